"""Lemma 2.1 and Theorem 2.2, computed for the vectors of a trained model; used in lecture.ipynb.

Attention is pure here, as App. A assumes: the model's weights as one head, without skip connections, FFN, LayerNorm,
biases or relative positions.
"""
import torch
from torch import nn


def norm(x) -> float:
    """||X||_{1,inf} = sqrt(||X||_1 ||X||_inf), from the largest column and row sums of |X|; section 2.2."""
    columns = torch.linalg.matrix_norm(x, 1)
    rows = torch.linalg.matrix_norm(x, torch.inf)
    return float(columns * rows) ** 0.5


def residual(h) -> float:
    """||H - 1 h^T|| / ||H|| (Frobenius), where h is the mean row; 0 if all rows are equal. Used in lecture.ipynb."""
    return float((h - h.mean(0)).norm() / h.norm())


def share_outside(gram, text_gram, dims: int) -> float:
    """The share of the squared length of the rows of H outside the first `dims` singular directions of a text.
    Takes gram = H^T H and the same product for the text, (d, d) float64 each. Used in lecture.ipynb."""
    _, directions = torch.linalg.eigh(text_gram)  # ascending
    inside = directions[:, -dims:]  # (d, dims)
    return 1 - float((inside.T @ gram @ inside).trace() / gram.trace())


def single_head(attention: nn.Module):
    """W^QK = W^Q W^K^T / sqrt(d) and W^VO = W^V W^O, (d, d) float64, as one head without biases; App. A."""
    # nn.Linear holds the transpose of the paper's W.
    query = attention.query.weight.double()
    key, value = attention.key_value.weight.double().chunk(2)
    output = attention.output.weight.double()
    return query.T @ key / len(query) ** 0.5, value.T @ output.T


def both_sides(real, masks, qk, vo) -> dict[str, float]:
    """||R'||_{1,inf} and its bound 4 epsilon ||R||^3_{1,inf} in Theorem 2.2, for one layer of pure attention. Takes
    `real`, which is H_R (n, d), and `masks`, which is H_M (m, d), in float64. U is the best solution of H_M = U H_R,
    Eq. (3), with U 1 = 1. As in the proof, U H_R then replaces H_M. Where the proof holds, `eq3` is 0 and `spread` is
    below 1.256."""
    n = len(real)
    h = real.mean(0)  # the x with the smallest ||H_R - 1 x^T||
    R = real - h
    U = (masks - h) @ torch.linalg.pinv(R, rtol=1e-6) + 1 / n  # (m, n); 1^T R = 0, so U 1 = 1
    eq3 = float((masks - U @ real).norm() / masks.norm())

    # Attention of H_R to H = [H_R; U H_R] = [R; U R] + 1 h^T; the terms c_i of App. A cancel in each row.
    keys = torch.cat([R, U @ R])  # (n + m, d)
    F = R @ qk @ keys.T  # [F, F'], (n, n + m)
    g = keys @ qk.T @ h  # [g, g'], (n + m,)
    out = (F + g).softmax(1) @ keys @ vo  # H'_R - 1 h^T W^VO
    weights = g.softmax(0)
    r = weights[:n] + weights[n:] @ U  # Eq. (8)
    left = out - r @ R @ vo  # R'

    size = float(torch.linalg.matrix_norm(U, torch.inf))
    epsilon = float(torch.linalg.matrix_norm(qk, 1)) * norm(vo) * size * (1 + size)
    spread = float((F.amax(1) - F.amin(1)).max())
    return {"left": norm(left), "right": 4 * epsilon * norm(R) ** 3, "spread": spread, "eq3": eq3}
