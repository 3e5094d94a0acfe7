"""Operations on configurations."""

from typing import Any

from pydantic import create_model

from rlhf.config.check import batch_faults
from rlhf.config.load import load_text
from rlhf.config.schema import BatchSection, Float, Int, Section
from rlhf.dist.layout import LayoutError, TrainLayout, division_faults
from tests.cases.case import Case, Op


def _type(declared: Any) -> Any:
    if isinstance(declared, dict):
        return _model(declared)
    if declared.startswith("list["):
        return list[_type(declared[5:-1])]  # type: ignore[misc]
    if declared.startswith("optional["):
        return _type(declared[9:-1]) | None
    return {"float": Float, "int": Int, "bool": bool, "str": str}[declared]


def _model(schema: dict[str, Any]) -> type[Section]:
    fields: dict[str, Any] = {name: (_type(kind), ...) for name, kind in schema.items()}
    return create_model("Declared", __base__=Section, **fields)


def yaml_typed_load(case: Case) -> Case:
    return {"values": load_text(_model(case["schema"]), case["yaml"], "case.yaml").model_dump()}


def env_in_config(case: Case) -> Case:
    model = _model({"field": case["field_type"]})
    loaded = load_text(model, "", "environment", [f"field={case['env_value']}"])
    return {"value": loaded.model_dump()["field"]}


def parallel_validate(case: Case) -> Case:
    given = {k: case[k] for k in ("world", "tp", "pp", "cp", "ep", "etp") if k in case}
    faults = []
    if "heads" in case:
        faults += division_faults("train.tp", case["tp"], {"attention heads": case["heads"]})
    if "experts" in case:
        faults += division_faults("train.ep", case.get("ep", 1), {"experts": case["experts"]})
    try:
        layout = TrainLayout(**given)
    except LayoutError as error:
        return {"valid": False, "faults": faults + error.faults}
    if faults:
        return {"valid": False, "faults": faults}
    return {"valid": True, "dp": layout.dp, "edp": layout.edp}


def batch_validate(case: Case) -> Case:
    updates = case["prompts"] * case["n"] / case["mini"]
    try:
        batch = BatchSection(
            prompts_per_step=case["prompts"],
            samples_per_prompt=case["n"],
            updates_per_step=updates,
        )
    except ValueError:
        return {"valid": False}
    sizes = (batch.prompts_per_step, batch.samples_per_prompt, batch.updates_per_step)
    if list(batch_faults(*sizes, case["dp"])):
        return {"valid": False}
    return {"valid": True, "updates": sizes[2], "per_rank": case["mini"] // case["dp"]}


OPS: dict[str, Op] = {
    "yaml_typed_load": yaml_typed_load,
    "env_in_config": env_in_config,
    "parallel_validate": parallel_validate,
    "batch_validate": batch_validate,
}
