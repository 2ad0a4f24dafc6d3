"""One HTML file that explains a run, or compares several: `python tools/report.py RUN [RUN ...]`.

read.py reads run directories, thin.py thins curves, words.py describes results in sentences, pack.py collects all of it
as plain data, and page.py makes the page, whose parts are in page/.
"""
