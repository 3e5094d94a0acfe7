"""What ``--show-flow`` says agrees with the table of records and with the phases of a run."""

from __future__ import annotations

import re

import pytest

import rlhf.types
from rlhf.config.load import load_text
from rlhf.config.schema import Config
from rlhf.flow import stages
from rlhf.types import Phase
from tests.unit.test_config_check import PPO, SMALL


def _table():
    """Column -> (who writes it, who reads it), from the text of ``rlhf.types``."""
    rows = re.findall(r"^\|([^|]+)\|([^|]+)\|([^|]+)\|[^|]+\|$", rlhf.types.__doc__, re.M)
    out = {}
    for names, writer, readers in rows:
        for name in names.split(","):
            out[name.strip()] = (writer.strip(), [r.strip() for r in readers.split(",")])
    return out


ROLES = {
    "grpo": [],
    "grpo with a reward model": ["reward_model.path=somewhere"],
    "ppo": PPO,
    "ppo that values cut-off answers": [*PPO, "algorithm.gae.bootstrap_truncated=true"],
}


@pytest.mark.parametrize("case", ROLES)
@pytest.mark.parametrize("kl", ["off", "loss", "reward"])
def test_the_flow_agrees_with_the_table_of_records(kl, case):
    coef = "null" if kl == "off" else "0.1"
    settings = [f"algorithm.kl.place={kl}", f"algorithm.kl.coef={coef}", *ROLES[case]]
    config = load_text(Config, SMALL, "x", settings)
    table, roles = _table(), {"all ranks": "batching", config.algorithm.name: "algorithm"}
    written = {"prompts"}
    for stage in stages(config):
        assert stage.phase in set(Phase)
        who = roles.get(stage.who, stage.who.split(" x ")[0])
        for name in (n.strip() for n in stage.writes.split(",")):
            if name in table and name != "rollout_logprobs":  # the engines' own, then batching's
                assert table[name][0] == who, name
            written.add(name)
        for name in (n.strip() for n in stage.reads.split(",")):
            if name not in table:
                continue
            assert name in written, f"{stage.who} reads {name} before it is written"
            reader = "losses" if stage.phase == "update" else who
            readers = table[name][1]
            assert reader in readers or "roles" in readers, (name, reader)
    assert ("ref_logprobs" in written) == (kl != "off")
    assert ({"values", "returns", "critic weights"} <= written) == case.startswith("ppo")
    assert ("end_values" in written) == ("cut-off" in case)
    who = [stage.who for stage in stages(config)]
    assert ("reward_model" in who) == ("reward model" in case)
    assert {"old_logprobs", "advantages", "credits", "loss_weights"} <= written
