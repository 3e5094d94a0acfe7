"""Weights that come back from engines other than they went there end the run."""

from tests.helpers.runs import rlhf, tiny_config

LOOP = '''
def train(run):
    """Until the first restore; rank 1 remembers one parameter wrongly."""
    run.resharder.run(version=0, step=0)
    if run.ground.plan.world.rank == 1:
        sums = run.resharder._record._sums
        sums["decoder.final_layernorm.weight"] ^= 1
    prompts = run.prompts.take(0, 4)
    rollout = run.collector.collect(prompts, 0, run.sampling, 4)
    run.actor.logprobs(run.batcher.pack(rollout, 0), 0)
    raise AssertionError("nobody noticed")
'''


def test_a_restore_that_differs_names_parameter_and_rank(tmp_path):
    config = tiny_config(tmp_path, memory={"time_slice": "all"})
    loop = tmp_path / "loop.py"
    loop.write_text(LOOP, encoding="utf-8")
    status, _, err = rlhf("train", str(config), "--loop", f"{loop}:train")
    assert status == 1
    words = "the restore was verified and is wrong: rank 1: decoder.final_layernorm.weight is not"
    assert words in err
