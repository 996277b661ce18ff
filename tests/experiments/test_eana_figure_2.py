"""Figure 2 has the shape that the paper describes."""

from experiments.eana.figure_2 import figure_2, plot_figure_2


def test_figure_2_has_the_papers_shape(tmp_path):
    """DP-SGD is always better, and the gap shrinks as σ falls and as C0 grows."""
    curves = figure_2([0.1, 0.3, 1.0], [100, 1000])
    for curve in curves.values():
        assert min(curve["ratio"]) > 1
        assert curve["ratio"] == sorted(curve["ratio"])
        assert all(p > e for p, e in zip(curve["eana_published"], curve["eana"]))
    assert all(big < small for big, small in zip(curves[1000]["ratio"], curves[100]["ratio"]))
    path = plot_figure_2(tmp_path / "figure_2.png", curves)
    assert path.read_bytes()[:4] == b"\x89PNG"
