"""One HTML file that explains a run, or compares several: `python tools/report.py RUN [RUN ...]`.

read.py reads run directories, thin.py draws many points as few, words.py says what was achieved, pack.py puts it
together as plain data, and page.py into a page, whose parts are in page/.
"""
