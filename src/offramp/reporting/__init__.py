"""Run folders in; one page, figures and tables out. Nothing here needs torch or builds a network."""
