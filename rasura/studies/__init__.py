"""Studies: a table of a paper as a plan, run by the same audit. The paper's figures are shown beside ours, never as ours."""
