"""How curves and their names look. The colours are Okabe and Ito's but yellow, a brown, and Tol's indigo, which
colour-blind readers can tell apart (a grey would be the fourth to some)."""

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A5230", "#332288"]


def plain(text):
    """A name as it is: matplotlib reads $...$ as formulas, leaves labels with _ before them out of legends, and gives a
    long one all the width."""
    text = text.encode("utf-8", "replace").decode()  # the name of a folder may be of any bytes
    text = text if len(text) <= 100 else text[:60] + "..." + text[-37:]
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")
