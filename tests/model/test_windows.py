"""Attention within windows of an image."""

from gspmd_lm.model.parts.windows import regions


def test_of_a_moved_image_only_patches_that_were_neighbours_see_each_other():
    """Of four windows of 2 x 2 patches, moved by one patch, those at the seam have patches of both sides."""
    assert regions(4, 2, 1).tolist() == [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 2, 2], [0, 1, 2, 3]]
