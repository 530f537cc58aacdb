"""Packing of tokenized documents into rows of one length.

Every rank and every worker process packs the same documents, by their lengths alone, and makes tensors of its own rows
only. Ranks therefore have the same number of batches, and the batches do not depend on the number of workers.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number


class _DocumentPiece(NamedTuple):
    """Tokens ``begin`` to ``end`` of a document with its labels."""

    number: int
    ids: Any
    labels: Any
    begin: int
    end: int


class PackedDocuments(IterableDataset[dict[str, Tensor]]):
    """Batches of rows that hold several documents each, for a loader with ``batch_size=None``.

    A batch is a mapping of tensors (batch_size, length), int64. ``position_ids`` restart with each document. Pads, at
    the end of a row, have the id 0 and continue the last document. The label of a token is the next token of its
    document, or -100 for its last token and for pads. At the end of the data, rows of pads fill the last batches.

    torchdata's ``StatefulDataLoader`` continues within an epoch. An abandoned iteration is followed by a whole one.

    Args:
        documents: sequence of documents of at least one token, which are read by index: ids (a list, an array or a 1-d
            tensor), or mappings with ``input_ids`` and, optionally, ``labels``: the same ids, or -100 for tokens that
            are not to be predicted.
        length: tokens of a row.
        batch_size: rows of a batch on one rank.
        method: ``best_fit`` (default) or ``sequential``, see :func:`assign_documents_to_rows`.
        window: number of documents that are packed together (default 1024). No row has documents of two windows.
        long_documents: ``cut`` (default) divides a document longer than a row into full rows and a rest, which is
            packed; ``refuse`` raises an error.
        seed: shuffles the documents by ``seed`` plus the number of the epoch (default None: in order).
        rank: number of this data-parallel rank, from the strategy's ``distributed_sampler_kwargs`` (default 0).
        num_replicas: number of data-parallel ranks, from the same place (default 1).

    Raises:
        SetupError: an argument has the wrong type or range. While iterating, an :class:`InputError` names the index of
            a document that is empty, too long, or not of integers.
    """

    def __init__(
        self,
        documents: Sequence[Any],
        length: int,
        batch_size: int,
        *,
        method: str = "best_fit",
        window: int = 1024,
        long_documents: str = "cut",
        seed: int | None = None,
        rank: int = 0,
        num_replicas: int = 1,
    ) -> None:
        for name, value in {
            "length": length,
            "batch_size": batch_size,
            "window": window,
            "num_replicas": num_replicas,
        }.items():
            check_whole_number(name, value, 1)
        check_whole_number("rank", rank, 0)
        check_whole_number("seed", seed, 0, optional=True)
        check_choice("method", method, ("best_fit", "sequential"))
        check_choice("long_documents", long_documents, ("cut", "refuse"))
        if rank >= num_replicas:
            raise SetupError(
                f"rank is {rank} with num_replicas={num_replicas}; expected a number from 0 to {num_replicas - 1}"
            )
        self.documents, self.length, self.batch_size, self.window = documents, length, batch_size, window
        self.method, self.long_documents, self.seed = method, long_documents, seed
        self.rank, self.num_replicas = rank, num_replicas
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        # What comes next: the row of the window of the epoch, for the batch.
        self._position, self._resumed = {"epoch": epoch, "window": 0, "row": 0, "batch": 0}, False

    def state_dict(self) -> dict[str, Any]:
        return {**self._position, "order": self._collect_packing_settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved_order, order = state.get("order"), self._collect_packing_settings()
        if saved_order != order or not self._position.keys() <= state.keys():
            raise SetupError(
                f"the position was saved for the rows of {saved_order}, and this PackedDocuments has {order}: the same"
                " position is at other documents. Continue with the arguments and documents of the earlier run"
            )
        self._position, self._resumed = {name: state[name] for name in self._position}, True

    def _collect_packing_settings(self) -> dict[str, Any]:
        """What the order of all rows depends on, besides the tokens."""
        names = ("length", "method", "window", "long_documents", "seed")
        return {"documents": len(self.documents)} | {name: getattr(self, name) for name in names}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self._position["batch"] and not self._resumed:
            self._start_epoch(self._position["epoch"] + 1)
        self._resumed = False
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        rows: list[list[_DocumentPiece]] = []
        for row in self._rows():
            rows += [row] if row else []
            if len(rows) == self.batch_size * self.num_replicas or (rows and not row):
                self._position["batch"] += 1
                if (self._position["batch"] - 1) % workers == number:
                    yield self._tensors(rows)
                rows = []
        self._start_epoch(self._position["epoch"] + 1)

    def _rows(self) -> Iterator[list[_DocumentPiece]]:
        """Rows of all ranks from the position on, and an empty one at the end."""
        total, position = len(self.documents), self._position
        order: Sequence[int] = range(total)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + position["epoch"])
            order = torch.randperm(total, generator=generator).tolist()
        for start in range(position["window"] * self.window, total, self.window):
            pieces = [piece for index in order[start : start + self.window] for piece in self._pieces(index)]
            rows = assign_documents_to_rows([piece.end - piece.begin for piece in pieces], self.length, self.method)
            for row in rows[position["row"] :]:
                position["row"] += 1
                yield [pieces[number] for number in row]
            position["window"], position["row"] = position["window"] + 1, 0
        yield []

    def _pieces(self, index: int) -> Iterator[_DocumentPiece]:
        document = self.documents[index]
        ids, labels, mask = document, document, None
        try:
            if isinstance(document, Mapping):
                ids, mask = document["input_ids"], document.get("attention_mask")
                labels = document.get("labels", ids)
            tokens, labeled = len(ids), len(labels)
        except (KeyError, TypeError) as error:
            raise InputError(
                f"document {index} is {document!r:.100}; expected ids, or a mapping with input_ids. Tokenize it"
            ) from error
        long = tokens > self.length and self.long_documents == "refuse"
        if not tokens or labeled != tokens or long:
            limit = f", and at most length={self.length}" if self.long_documents == "refuse" else ""
            cut = ", or cut it (long_documents='cut' does so)" if long else ""
            raise InputError(
                f"document {index} has {tokens} tokens and {labeled} labels; expected at least one token, and one"
                f" label for each{limit}. Remove it{cut}"
            )
        if mask is not None and not torch.as_tensor(mask).all():
            raise InputError(
                f"document {index} has an attention_mask with zeros; expected tokens without padding. Tokenize with"
                " padding=False"
            )
        for begin in range(0, tokens, self.length):
            yield _DocumentPiece(index, ids, labels, begin, min(begin + self.length, tokens))

    def _tensors(self, rows: list[list[_DocumentPiece]]) -> dict[str, Tensor]:
        """Own part of a batch of all ranks."""
        local_rows, shape = rows[self.rank :: self.num_replicas], (self.batch_size, self.length)
        ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
        positions = torch.arange(self.length).repeat(self.batch_size, 1)
        for row, pieces in enumerate(local_rows):
            start = 0
            for piece in pieces:
                end = start + piece.end - piece.begin
                ids[row, start:end] = _convert_ids_to_tensor(piece, piece.ids[piece.begin : piece.end])
                following = _convert_ids_to_tensor(piece, piece.labels[piece.begin + 1 : piece.end + 1])
                labels[row, start : start + len(following)] = following
                positions[row, start:] = torch.arange(self.length - start)
                start = end
        return {"input_ids": ids, "labels": labels, "position_ids": positions}


def assign_documents_to_rows(lengths: Sequence[int], length: int, method: str = "best_fit") -> list[list[int]]:
    """Numbers of the documents of each row, ascending; rows are in the order of their first documents.

    - ``sequential``: a document goes to the current row, or starts a new row if it does not fit there.
    - ``best_fit``: documents are placed by length, longest first and equal ones in order, each into the fullest row it
      fits into (of equally full rows, the oldest), or into a new row. In the rare case that this needs more rows than
      ``sequential``, the rows of ``sequential`` are returned.

    Args:
        lengths: tokens of each document, from 1 to *length*.
        length: tokens of a row.
        method: one of the two (default ``best_fit``).
    """
    rows: list[list[int]] = []
    free = 0
    for number, size in enumerate(lengths):
        if size > free:
            rows.append([])
            free = length
        rows[-1].append(number)
        free -= size
    if method == "sequential":
        return rows
    best: list[list[int]] = []
    frees: list[tuple[int, int]] = []  # free tokens and number of each row, ascending
    for number in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect.bisect_left(frees, (lengths[number], 0))
        if place == len(frees):
            frees.append((length, len(best)))
            best.append([])
        free, row = frees.pop(place)
        best[row].append(number)
        bisect.insort(frees, (free - lengths[number], row))
    return sorted(map(sorted, best)) if len(best) <= len(rows) else rows


def split_packed_batch_by_row(batch: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Make a micro-batch of each row of a :class:`PackedDocuments` batch, with the boundaries of its documents.

    Use it as the loader's ``collate_fn`` if the model takes ``cu_seq_lens_q/k`` (int32) and ``max_length_q/k`` (int).
    """
    micro_batches: list[dict[str, Any]] = []
    for row, positions in enumerate(batch["position_ids"]):
        ends = torch.cat([(positions == 0).nonzero().flatten(), torch.tensor([len(positions)])]).int()
        longest = int(ends.diff().max())
        boundaries = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        micro_batches.append({key: value[row : row + 1] for key, value in batch.items()} | boundaries)
    return micro_batches


def _convert_ids_to_tensor(piece: _DocumentPiece, values: Any) -> Tensor:
    try:
        tensor = values if isinstance(values, Tensor) else torch.tensor(values)
        # The labels of a single token are an empty list, of any dtype.
        if not len(tensor) or (tensor.ndim == 1 and not tensor.dtype.is_floating_point and tensor.dtype != torch.bool):
            return tensor.long()
        error, shown = None, f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    except (TypeError, ValueError, RuntimeError) as raised:
        error, shown = raised, f"{values!r:.100}"
    raise InputError(
        f"document {piece.number} holds {shown}; expected a list, an array or a 1-d tensor of integers. Tokenize it"
    ) from error
