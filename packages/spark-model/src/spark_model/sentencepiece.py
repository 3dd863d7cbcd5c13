"""SentencePiece's BPE from pieces and scores.

SentencePiece stores no merges: it joins the neighbouring pair whose joined text is the piece of the highest score.
That is the same as a merge list that holds every way to cut each piece in two, best score first.
"""

from collections.abc import Mapping, Sequence

from tokenizers import models


def create_sentencepiece_model(
    vocabulary: Mapping[str, int],
    tokens: Sequence[str],
    scores: Sequence[float],
    normal: Sequence[int],
    *,
    unknown_token: str,
) -> models.BPE:
    """`normal` are the ids that merging may produce: control and byte tokens never come out of plain text."""
    merges = merges_from_scores(tokens, scores, normal)
    return models.BPE(
        dict(vocabulary), merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True, ignore_merges=False
    )


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], normal: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to a piece, by falling score of the result.

    Pairs of the same score stand in the order of their ids, as in the tokenizer.json files that are made from the
    same models.
    """
    ids = {tokens[index]: index for index in normal}
    pairs: list[tuple[float, int, int]] = []
    for token, index in ids.items():
        rank = -scores[index]
        for cut in range(1, len(token)):
            left = ids.get(token[:cut])
            if left is None:
                continue
            right = ids.get(token[cut:])
            if right is not None:
                pairs.append((rank, left, right))
    pairs.sort()
    return [(tokens[left], tokens[right]) for _, left, right in pairs]
