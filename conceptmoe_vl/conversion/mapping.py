"""Which bytes of a source become which tensor of the converted model.

A layer's experts lie on disk one by one (`experts.N.gate_proj.weight`, Mixtral's `w1`, `w3`, `w2`)
or fused (`experts.gate_up_proj [E, 2F, D]`, in Qwen3-VL-MoE's files turned round). Here they are
fused, gate first, which the pieces of a tensor express without assembling it in memory.

A dense MLP becomes E experts that are all copies of it (sparse upcycling, arXiv 2212.05055). Their
weights are divided by the sum of the chosen ones, so that any K of them give the MLP's output
exactly, whatever the router says. Slices of the MLP instead of copies would be exact only while
the router picks one of each slice, and no longer after the number of experts per concept is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch

from conceptmoe_vl.conversion.families import Family
from conceptmoe_vl.conversion.reading import DTYPES, VALUE_BYTES, Checkpoint, StoredTensor
from conceptmoe_vl.conversion.writing import Computed, Copied, NewTensor
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.sections import ChunkConfig, TextConfig

_BLOCKS = ("mlp", "block_sparse_moe")
_ONE_BY_ONE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_NO_WEIGHTS = ("rotary_emb.inv_freq",)  # buffers that old checkpoints hold


class Mapping:
    """The tensors of a converted language model, from those of its source.

    Args:
        source: the checkpoint. family: its kind. text, chunk: sections of the converted model.
        new_rows: rows of embedding and head that start at the mean of the source's; those beyond
            the source's rows must be among them.
        known_rows: rows that the mean is taken over, those of the source's tokenizer.
        seed: of the routers that upcycling makes.
    """

    def __init__(
        self,
        source: Checkpoint,
        family: Family,
        text: TextConfig,
        chunk: ChunkConfig,
        new_rows: list[int],
        known_rows: int,
        seed: int = 0,
    ) -> None:
        assert text.head_dim is not None  # TextConfig fills it in
        self.source, self.family, self.text, self.chunk = source, family, text, chunk
        self.new_rows, self.known_rows, self.seed = new_rows, known_rows, seed
        self.size = text.head_dim
        self.dtype = source.tensor(f"{family.prefix}.embed_tokens.weight").dtype
        self._used: set[str] = set()

    def tensors(self) -> list[NewTensor]:
        """All of them but what the chunk module, the vision tower and the projector hold.

        Raises:
            UserError: a tensor is missing or of another shape, or one of the source's has no place
                in the converted model.
        """
        d, prefix = self.text.hidden_size, self.family.prefix
        new = [self._vocabulary("embed_tokens.weight", f"{prefix}.embed_tokens.weight")]
        stages = (
            ("encoder", self.text.encoder_layers),
            ("concept", self.text.concept_layers),
            ("decoder", self.text.decoder_layers),
        )
        number = 0
        for stage, count in stages:
            for index in range(count):
                target = f"language_model.{stage}.layers.{index}"
                new += self._layer(target, f"{prefix}.layers.{number}", number, stage)
                number += 1
            if stage == "decoder":
                first = count - self.chunk.joint_decoding_layers
                for index in range(first, count):
                    new += self._joint(f"language_model.decoder.layers.{index}.self_attn.joint")
        new.append(self._same("language_model.norm.weight", f"{prefix}.norm.weight", (d,)))
        if self.text.tie_word_embeddings:
            self._refuse_another_head()
        else:
            new.append(self._vocabulary("lm_head.weight", "lm_head.weight"))
        self._refuse_leftovers()
        return new

    def _refuse_another_head(self) -> None:
        """Some files hold a tied head all the same; transformers takes it if it differs."""
        head, embedding = "lm_head.weight", f"{self.family.prefix}.embed_tokens.weight"
        if head not in self.source:
            return
        rows = self.source.tensor(embedding).shape[0]
        theirs = self._take(head, (rows, self.text.hidden_size))
        if not same_rows(self.source.tensor(embedding), theirs):
            raise UserError(
                f"'{self.source.folder}' ties the head to the embedding (tie_word_embeddings), but "
                f"holds another {head}; set tie_word_embeddings to false if that head is meant, "
                "or remove it"
            )

    def _refuse_leftovers(self) -> None:
        left = [
            name
            for name in self.source
            if name not in self._used
            and not name.startswith(self.family.ignored or ("\0",))
            and not name.endswith(_NO_WEIGHTS)
        ]
        if left:
            raise UserError(
                f"'{self.source.folder}' holds {len(left)} tensors that this family's layers do "
                f"not have, the first is {min(left)}; they would be lost"
            )

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        self._used.add(name)
        return self.source.tensor(name, shape)

    def _same(self, target: str, name: str, shape: tuple[int, ...]) -> NewTensor:
        stored = self._take(name, shape)
        return NewTensor(target, stored.dtype, shape, (Copied.whole(stored),))

    def _computed(
        self, target: str, shape: tuple[int, ...], make: Callable[[], torch.Tensor]
    ) -> NewTensor:
        size = math.prod(shape) * VALUE_BYTES[self.dtype]
        return NewTensor(
            target, self.dtype, shape, (Computed(lambda: make().to(DTYPES[self.dtype]), size),)
        )

    def _vocabulary(self, target: str, name: str) -> NewTensor:
        """Embedding or head with its new rows at the mean of the known ones."""
        rows = self.source.tensor(f"{self.family.prefix}.embed_tokens.weight").shape[0]
        stored = self._take(name, (rows, self.text.hidden_size))
        mean = Computed(cache(partial(mean_row, stored, self.known_rows)), stored.row_bytes)
        pieces: list[Copied | Computed] = []
        start = 0
        for row in self.new_rows:
            if row > start:
                pieces.append(Copied.rows(stored, start, row))
            pieces.append(mean)
            start = row + 1
        if start < rows:
            pieces.append(Copied.rows(stored, start, rows))
        shape = (self.text.vocab_size, self.text.hidden_size)
        return NewTensor(target, stored.dtype, shape, tuple(pieces))

    def _layer(self, target: str, name: str, number: int, stage: str) -> list[NewTensor]:
        text, d = self.text, self.text.hidden_size
        query, key = (
            heads * self.size for heads in (text.num_attention_heads, text.num_key_value_heads)
        )
        wide = text.qk_norm_over == "all_heads"
        shapes = {
            "q_proj": (query, d),
            "k_proj": (key, d),
            "v_proj": (key, d),
            "o_proj": (d, query),
        }
        new = []
        for norm in ("input_layernorm", "post_attention_layernorm"):
            new.append(self._same(f"{target}.{norm}.weight", f"{name}.{norm}.weight", (d,)))
        for part, shape in shapes.items():
            tensors: list[tuple[str, tuple[int, ...]]] = [("weight", shape)]
            if text.attention_bias == "all" or (text.attention_bias == "qkv" and part != "o_proj"):
                tensors.append(("bias", shape[:1]))
            for kind, size in tensors:
                where = f"self_attn.{part}.{kind}"
                new.append(self._same(f"{target}.{where}", f"{name}.{where}", size))
        if text.qk_norm:
            for part, width in (("q_norm", query), ("k_norm", key)):
                where = f"self_attn.{part}.weight"
                own = (width if wide else self.size,)
                new.append(self._same(f"{target}.{where}", f"{name}.{where}", own))
        if self.family.dense:
            return new + self._upcycled(target, name, number, stage)
        return new + self._experts(target, name)

    def _experts(self, target: str, name: str) -> list[NewTensor]:
        text, d = self.text, self.text.hidden_size
        block = next((b for b in _BLOCKS if f"{name}.{b}.gate.weight" in self.source), _BLOCKS[0])
        name = f"{name}.{block}"
        router = (text.num_experts, d)
        new = [self._same(f"{target}.mlp.gate.weight", f"{name}.gate.weight", router)]
        if f"{name}.experts.gate_up_proj" in self.source:
            new += self._fused(f"{target}.mlp.experts", f"{name}.experts")
        else:
            new += self._one_by_one(f"{target}.mlp.experts", f"{name}.experts")
        if text.num_shared_experts:
            width = text.width_of_shared
            for part, shape in (
                ("gate_proj", (width, d)),
                ("up_proj", (width, d)),
                ("down_proj", (d, width)),
            ):
                new.append(
                    self._same(
                        f"{target}.mlp.shared.{part}.weight",
                        f"{name}.shared_expert.{part}.weight",
                        shape,
                    )
                )
            gate = f"{name}.shared_expert_gate.weight"
            new.append(self._same(f"{target}.mlp.shared_gate.weight", gate, (1, d)))
        return new

    def _fused(self, target: str, name: str) -> list[NewTensor]:
        text = self.text
        experts, d, f = text.num_experts, text.hidden_size, text.moe_intermediate_size
        new = []
        for part, shape in (("gate_up_proj", (experts, 2 * f, d)), ("down_proj", (experts, d, f))):
            stored = self.source.tensor(f"{name}.{part}")
            turned = (shape[0], shape[2], shape[1])
            self._take(f"{name}.{part}", turned if stored.shape == turned != shape else shape)
            pieces: tuple[Copied | Computed, ...] = (Copied.whole(stored),)
            if stored.shape != shape:
                pieces = tuple(
                    Computed(partial(_turned_expert, stored, expert), stored.row_bytes)
                    for expert in range(experts)
                )
            new.append(NewTensor(f"{target}.{part}", stored.dtype, shape, pieces))
        return new

    def _one_by_one(self, target: str, name: str) -> list[NewTensor]:
        names = _ONE_BY_ONE[f"{name}.0.{_ONE_BY_ONE[1][0]}.weight" in self.source]
        matrices = [
            [f"{name}.{expert}.{part}.weight" for part in names]
            for expert in range(self.text.num_experts)
        ]
        return self._joined(target, matrices)

    def _joined(self, target: str, matrices: list[list[str]]) -> list[NewTensor]:
        """The fused tensors of experts given by the names of their (gate, up, down)."""
        d, f = self.text.hidden_size, self.text.moe_intermediate_size
        gate_up, down = [], []
        for gate_name, up_name, down_name in matrices:
            gate_up += [self._take(gate_name, (f, d)), self._take(up_name, (f, d))]
            down.append(self._take(down_name, (d, f)))
        experts = len(matrices)
        new = []
        for part, shape, stored in (
            ("gate_up_proj", (experts, 2 * f, d), gate_up),
            ("down_proj", (experts, d, f), down),
        ):
            kinds = sorted({tensor.dtype for tensor in stored})
            if len(kinds) > 1:
                raise UserError(
                    f"the experts around {stored[0].name} are of {' and '.join(kinds)}; they must "
                    "share one dtype"
                )
            pieces = tuple(Copied.whole(tensor) for tensor in stored)
            new.append(NewTensor(f"{target}.{part}", kinds[0], shape, pieces))
        return new

    def _upcycled(self, target: str, name: str, number: int, stage: str) -> list[NewTensor]:
        text, d = self.text, self.text.hidden_size
        experts = text.experts_of_concepts if stage == "concept" else text.num_experts
        names = [f"{name}.mlp.{part}.weight" for part in _ONE_BY_ONE[0]]
        router = self._computed(
            f"{target}.mlp.gate.weight",
            (experts, d),
            partial(_normal, (experts, d), text.initializer_range, (self.seed << 20) + number),
        )
        return [router, *self._joined(f"{target}.mlp.experts", [names] * experts)]

    def _joint(self, target: str) -> list[NewTensor]:
        """Joint decoding that adds nothing yet."""
        text, d = self.text, self.text.hidden_size
        new = [self._computed(f"{target}.norm.weight", (d,), partial(torch.ones, d))]
        for part, heads in (
            ("q_proj", text.num_attention_heads),
            ("k_proj", text.num_key_value_heads),
            ("v_proj", text.num_key_value_heads),
        ):
            shape = (heads * self.size, d)
            new.append(
                self._computed(f"{target}.{part}.weight", shape, partial(torch.zeros, shape))
            )
        return new


def mean_row(stored: StoredTensor, rows: int) -> torch.Tensor:
    """`[1, D]` mean of the first rows of an embedding, in its dtype; read in parts."""
    total = torch.zeros(stored.shape[1], dtype=torch.float64)
    for start, stop in _parts(stored, rows):
        total += stored.rows(start, stop).double().sum(0)
    return (total / rows).to(DTYPES[stored.dtype]).unsqueeze(0)


def same_rows(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two matrices of one shape hold the same values; read in parts."""
    return all(torch.equal(a.rows(*part), b.rows(*part)) for part in _parts(a, a.shape[0]))


def _parts(stored: StoredTensor, rows: int) -> Iterator[tuple[int, int]]:
    step = max((16 << 20) // stored.row_bytes, 1)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _turned_expert(stored: StoredTensor, expert: int) -> torch.Tensor:
    return stored.rows(expert, expert + 1).transpose(1, 2).contiguous()


def _normal(shape: tuple[int, ...], std: float, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
