"""Studies: a table of a paper as a plan, run by the same audit; the paper's figures stand beside ours, never as ours."""
