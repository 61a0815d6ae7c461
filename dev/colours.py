"""The colours of curves, in pictures and on the page of watch.py: Okabe and Ito's but yellow, a brown, and Tol's indigo,
which colour-blind readers can tell apart (a grey would be the fourth to some)."""

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A5230", "#332288"]
