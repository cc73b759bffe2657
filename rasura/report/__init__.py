"""Reports: findings, verdicts and pages, made from Records alone."""
