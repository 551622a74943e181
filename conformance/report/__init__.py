"""Reports: one document (:mod:`document`), shown on a terminal and written to a folder."""
