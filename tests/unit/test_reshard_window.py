"""Window and receiver: the real ones, with the receiver's loader call in a thread."""

from __future__ import annotations

import gc
import json
import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.reshard.execute import Mover
from rlhf.reshard.schedule import rank_plan
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import LocalHub
from rlhf.reshard.windows import ReceiverError, Window, allocator_settings, plain_segments
from rlhf.reshard.wire import Word
from rlhf.rollout import receiver
from rlhf.weights.families import (
    full_shapes,
    rollout_param_shapes,
    rollout_pieces,
    train_param_shapes,
    train_pieces,
)
from rlhf.weights.spread import spread_of_shards
from tests.helpers.movers import in_threads, no_poll
from tests.helpers.shapes import make_shape
from tests.helpers.shards import coded_tensors, cut, dtypes_of, dummy_engine

TRAIN, ROLLOUT = TrainLayout(1), RolloutLayout(1)


class OneRank:
    """A rank with its trainer shard, its window, and an engine's model in the same process."""

    def __init__(self, shape=None, dtype=torch.float32, area_bytes=4096, limit_s=10.0):
        shape = shape or make_shape("qwen3")
        self.pieces = rollout_pieces(shape, ROLLOUT, 0)
        self.shapes = rollout_param_shapes(shape, ROLLOUT, 0)
        source = train_pieces(shape, TRAIN, 0)
        self.full = coded_tensors(full_shapes(shape), torch.float32)
        self.params = cut(self.full, source, train_param_shapes(shape, TRAIN, 0))
        mine = rank_plan(
            spread_of_shards([source], [self.pieces]),
            Topology.of(1, 1),
            0,
            itemsize=dtype.itemsize,
            area_bytes=area_bytes,
        )
        self.window = Window(mine.incoming_area_bytes)
        self.mover = Mover(
            mine,
            self.params,
            LocalHub(1).transport(0),
            self.window,
            dtype=dtype,
            limit_s=limit_s,
        )
        self.model = dummy_engine(self.shapes, dtype, dtypes_of(self.pieces, dtype))

    def load(self, message):
        receiver.load(self.model, [(json.dumps(message), torch.empty(0))])

    def open(self):
        self.load(self.mover.open_message())
        self.window.wait_opened(10.0, no_poll)

    def update(self):
        message = self.mover.update_message()
        return in_threads([partial(self.mover.run, no_poll), partial(self.load, message)])[0]

    def assert_engine_holds(self, full):
        wanted = cut(full, self.pieces, self.shapes)
        for name, parameter in self.model.named_parameters():
            real = wanted[name] >= 0
            assert torch.equal(parameter[real], wanted[name].to(parameter.dtype)[real]), name


@pytest.mark.parametrize(
    "family,dtype",
    [
        ("qwen3", torch.float32),
        ("qwen3", torch.bfloat16),
        ("deepseek_v3", torch.bfloat16),
        ("glm4_moe", torch.bfloat16),
    ],
)
def test_updates_write_live_parameters_in_place(family, dtype):
    """Those that are float32 in a bfloat16 model too, without rounding."""
    rank = OneRank(make_shape(family), dtype=dtype)
    rank.open()
    pointers = [p.data_ptr() for p in rank.model.parameters()]
    stats = rank.update()
    rank.assert_engine_holds(rank.full)
    assert stats.num_rounds > 3
    for name in rank.params:
        rank.params[name] = rank.params[name] + 1
    rank.update()
    rank.assert_engine_holds({n: t + 1 for n, t in rank.full.items()})
    assert [p.data_ptr() for p in rank.model.parameters()] == pointers


def test_sleep_leaves_nothing_and_an_update_brings_all_back():
    rank = OneRank()
    rank.open()
    rank.update()
    rank.load({"op": "sleep", "free": False})
    assert all(p.isnan().all() for p in rank.model.parameters())
    rank.update()
    rank.assert_engine_holds(rank.full)
    padding = {
        name: int(p.isnan().any(dim=-1).sum())
        for name, p in rank.model.named_parameters()
        if p.isnan().any()
    }
    assert padding == {"model.embed_tokens.weight": 192 - 131, "lm_head.weight": 192 - 131}


def test_large_weights_give_up_their_pages_in_sleep():
    rank = OneRank(make_shape("qwen3", vocab_size=8192), area_bytes=2**18)
    rank.open()
    rank.update()
    pointers = [p.data_ptr() for p in rank.model.parameters()]
    rank.load({"op": "sleep", "free": True})
    inner = rank.model.get_parameter("lm_head.weight")[1000:-1000]
    assert inner.eq(0).all()  # what the system gives for a page that was released
    assert rank.model.get_parameter("model.norm.weight").isnan().all()
    rank.update()
    rank.assert_engine_holds(rank.full)
    assert [p.data_ptr() for p in rank.model.parameters()] == pointers


def test_what_the_model_derives_from_its_weights_sleeps_with_them():
    rank = OneRank()
    rank.open()
    module = rank.model.get_submodule("model.layers.0.self_attn")
    module.w_kc = torch.ones(2, 3, 4).transpose(1, 2)
    rank.load({"op": "sleep", "free": False})
    assert module.w_kc.isnan().all()


def test_parameters_replaced_after_the_opening_are_found():
    rank = OneRank()
    rank.open()
    name = "model.layers.1.self_attn.o_proj.weight"
    parameter = rank.model.get_parameter(name)
    parameter.data = torch.zeros_like(parameter)
    rank.update()
    rank.assert_engine_holds(rank.full)


def test_the_table_describes_the_live_model():
    rank = OneRank()
    rank.open()
    assert rank.window.reply() is None
    rank.load({"op": "table"})
    table = rank.window.reply()
    assert {n: tuple(row["shape"]) for n, row in table.items()} == rank.shapes
    for name, parameter in rank.model.named_parameters():
        assert table[name]["data_ptr"] == parameter.data_ptr()
        assert table[name]["dtype"] == "float32" and table[name]["contiguous"]


def test_post_load_weights_runs_after_the_last_round_of_each_update():
    rank = OneRank()
    seen = []

    def post_load_weights():
        seen.append({n: bool(p.isnan().any()) for n, p in rank.model.named_parameters()})

    rank.model.post_load_weights = post_load_weights
    rank.open()
    assert not seen
    rank.update()
    rank.update()
    assert len(seen) == 2
    assert not any(v for n, v in seen[0].items() if "layers" in n)


def _remove(model, name):
    path, leaf = name.rsplit(".", 1)
    del model.get_submodule(path)._parameters[leaf]


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda m: _remove(m, "model.norm.weight"), "no parameter model.norm.weight"),
        (
            lambda m: m.register_parameter("extra", torch.nn.Parameter(torch.zeros(2))),
            "does not write extra",
        ),
        (
            lambda m: setattr(
                m.get_parameter("model.norm.weight"), "data", torch.zeros(7)
            ),
            r"model.norm.weight has shape \[7\]",
        ),
        (
            lambda m: setattr(
                m.get_parameter("model.layers.0.mlp.down_proj.weight"), "data", torch.zeros(20, 32)
            ),
            "down_proj.weight has 640 elements, the plan writes 480",
        ),
        (
            lambda m: setattr(
                m.get_parameter("model.norm.weight"), "data", torch.zeros(20, 1)
            ),
            r"model.norm.weight has shape \[20, 1\]",
        ),
        (
            lambda m: m.get_submodule("model.norm").register_buffer("bias", torch.zeros(20)),
            "does not write model.norm.bias",
        ),
        (lambda m: m.to(torch.bfloat16), "torch.bfloat16, the plan writes torch.float32"),
        (
            lambda m: setattr(
                m.get_parameter("model.norm.weight"), "data", torch.zeros(20).bfloat16()
            ),
            r"differ: model.norm.weight is torch.bfloat16, the plan writes torch.float32\n",
        ),
    ],
)  # fmt: skip
def test_a_model_that_differs_from_the_plan_is_refused_at_the_opening(change, words):
    rank = OneRank()
    change(rank.model)
    with pytest.raises(ReceiverError, match=words):
        rank.open()


def test_all_differences_are_told_at_once_up_to_a_dozen():
    rank = OneRank()
    for name in ("model.norm.weight", "model.layers.2.input_layernorm.weight"):
        _remove(rank.model, name)
    with pytest.raises(
        ReceiverError, match=r"no parameter model\.layers\.2.*no parameter model\.n"
    ):
        rank.open()
    for number in range(20):
        rank.model.register_buffer(f"extra{number:02}", torch.zeros(1))
    with pytest.raises(ReceiverError, match=r"and 10 more"):
        rank.open()


def test_what_follows_from_the_configuration_is_no_difference():
    rank = OneRank()
    for name in ("cos_sin_cache", "inv_freq"):
        rank.model.get_submodule("model.layers.0.self_attn").register_buffer(name, torch.ones(3))
    rank.open()
    rank.update()
    rank.assert_engine_holds(rank.full)


def test_a_refused_opening_fails_the_update_too():
    rank = OneRank()
    _remove(rank.model, "model.norm.weight")
    rank.load(rank.mover.open_message())
    with pytest.raises(RuntimeError, match=r"no parameter model\.norm\.weight"):
        rank.update()


def test_an_error_while_writing_names_parameter_and_round_and_ends_the_call():
    rank = OneRank()
    rank.open()
    parameter = rank.model.get_parameter("model.layers.2.mlp.gate_up_proj.weight")
    parameter.data = parameter.data[:5].clone()
    with pytest.raises(RuntimeError, match=r"round \d+, parameter model\.layers\.2\.mlp\.gate_up"):
        rank.update()


def test_an_update_works_after_a_failed_one():
    rank = OneRank()
    rank.open()
    name = "model.layers.2.mlp.gate_up_proj.weight"
    parameter = rank.model.get_parameter(name)
    whole = parameter.data
    parameter.data = whole[:5].clone()
    with pytest.raises(RuntimeError):
        rank.update()
    parameter.data = whole
    rank.update()
    rank.assert_engine_holds(rank.full)


def test_the_error_of_an_update_is_not_that_of_the_next():
    """The receiver has reported its error and not yet left when the next update begins."""
    rank = OneRank()
    rank.open()
    rank.window._write(Word.ERROR, 5)
    rank.window._sequence = 1

    def leave():
        rank.window._write(Word.SEQUENCE, 1)

    assert rank.window.begin(10.0, leave) == 2
    rank.window.check()


def test_a_receiver_that_never_comes_times_out():
    rank = OneRank(limit_s=0.1)
    rank.open()
    with pytest.raises(RuntimeError, match=r"round 2 of .*waited 0\.1 s.*to write round 0"):
        rank.mover.run(no_poll)


def test_a_rank_that_never_posts_times_out_in_the_receiver():
    rank = OneRank()
    rank.open()
    rank.load({**rank.mover.update_message(), "limit_s": 0.1})
    with pytest.raises(RuntimeError, match=r"waited 0\.1 s for the rank to begin update 1"):
        rank.mover.run(no_poll)


def test_an_abandoned_update_releases_the_receiver():
    """The rank fails in the middle; the loader call returns, the next update is whole."""
    rank = OneRank()
    rank.open()
    message = {**rank.mover.update_message(), "limit_s": 60.0}
    loader = threading.Thread(target=rank.load, args=(message,), daemon=True)
    norm = rank.params.pop("decoder.final_layernorm.weight")
    loader.start()
    with pytest.raises(RuntimeError, match=r"rank 0, round \d+ .*final_layernorm\.weight is gone"):
        rank.mover.run(no_poll)
    loader.join(10)
    assert not loader.is_alive()
    rank.params["decoder.final_layernorm.weight"] = norm
    rank.update()
    rank.assert_engine_holds(rank.full)


def test_an_update_of_the_previous_number_is_not_mistaken_for_the_next():
    """Words of a finished update lie in the window when the next loader call begins."""
    rank = OneRank()
    rank.open()
    rank.update()
    for name in rank.params:
        rank.params[name] = rank.params[name] + 1
    message = rank.mover.update_message()
    loader = threading.Thread(target=rank.load, args=(message,))
    loader.start()
    rank.mover.run(no_poll)
    loader.join(10)
    rank.assert_engine_holds({n: t + 1 for n, t in rank.full.items()})


def test_stages_pick_their_own_message():
    rank = OneRank()
    rank.model.pp_group = type("Group", (), {"rank_in_group": 1})()
    rank.load({"stages": [{"op": "no such stage"}, rank.mover.open_message()]})
    rank.window.wait_opened(10.0, no_poll)
    rank.update()
    rank.assert_engine_holds(rank.full)


def test_a_stage_lets_its_call_go_on_and_joins_the_update_in_the_next():
    """A later stage gets the call when this one returns: no rank may wait inside for another."""
    rank = OneRank()
    rank.open()
    rank.model.pp_group = type("Group", (), {"rank_in_group": 0})()
    rank.load({"stages": [rank.mover.update_message(), {"op": "no such stage"}]})
    joined = threading.Thread(target=rank.load, args=({"stages": [{"op": "join"}] * 2},))
    joined.start()
    assert joined.is_alive()  # until the rank has driven its rounds
    rank.mover.run(no_poll)
    joined.join(10)
    assert not joined.is_alive()
    rank.assert_engine_holds(rank.full)


def test_a_window_that_nobody_opened_is_waited_for():
    rank = OneRank()
    with pytest.raises(TimeoutError, match="to open the window"):
        rank.window.wait_opened(0.05, no_poll)
    rank.open()


@pytest.mark.parametrize(
    "message", ["{", '{"op": "table"}', '{"op": "open", "path": "/no/window"}']
)
def test_messages_without_a_window_do_not_raise(message, caplog):
    receiver.load(dummy_engine({"a.weight": (2, 2)}, torch.float32), [(message, torch.empty(0))])
    assert "no window to report this through" in caplog.text


def test_an_unknown_message_is_an_error_in_the_window():
    rank = OneRank()
    rank.open()
    rank.load({"op": "dance"})
    with pytest.raises(ReceiverError, match="dance"):
        rank.window.check()


def test_a_window_smaller_than_the_rounds_is_refused():
    rank = OneRank()
    with pytest.raises(RuntimeError, match="an area of the window has 64"):
        Mover(
            rank.mover.plan, rank.params, LocalHub(1).transport(0), Window(64), dtype=torch.float32
        )


def test_a_window_leaves_no_name_and_survives_its_descriptor():
    rank = OneRank()
    rank.open()
    rank.window.close()
    assert rank.window.fd == -1
    rank.update()
    rank.assert_engine_holds(rank.full)


def _mappings(inode):
    """How often this process maps the file."""
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return sum("reshard-window" in line and f" {inode} " in line for line in lines)


def test_a_window_is_mapped_once_at_each_end_and_gone_when_both_have_let_go():
    """Opened with the first message, not with each update; nothing else keeps its memory."""
    rank = OneRank()
    inode = os.fstat(rank.window.fd).st_ino
    rank.open()
    for _ in range(3):
        rank.update()
        assert _mappings(inode) == 2, "the rank's and the engine's"
    rank.model = None
    gc.collect()
    assert _mappings(inode) == 1
    rank.window.close()
    rank.mover = rank.window = None
    gc.collect()
    assert _mappings(inode) == 0


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11 cannot say"
)
@pytest.mark.parametrize(
    "setting", ["", "expandable_segments:True", "max_split_size_mb:64,expandable_segments:True"]
)
def test_a_window_on_a_device_is_not_in_an_expandable_segment(setting):
    """The rest of the allocator's settings stays, and all are back afterwards."""
    read, write = (
        torch._C._accelerator_getAllocatorSettings,
        torch._C._accelerator_setAllocatorSettings,
    )
    before = read()
    write(setting)
    try:
        with pytest.raises(OSError, match="no memory"), plain_segments():
            inside = read()
            raise OSError("no memory")
        assert inside == setting.replace("segments:True", "segments:False")
        assert read() == setting
    finally:
        write(before)


def test_an_older_torch_has_the_allocator_settings_of_the_environment():
    newer_torch = SimpleNamespace(_accelerator_getAllocatorSettings=lambda: "in force")
    assert allocator_settings(newer_torch, {"PYTORCH_ALLOC_CONF": "at the start"}) == "in force"
    older = object()
    assert allocator_settings(older, {}) == ""
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_settings(older, environ) == "expandable_segments:True"
    newer = {**environ, "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert allocator_settings(older, newer) == "max_split_size_mb:64"
