"""Keys: declares the keys of the section `trainer` that files for verl's trainer have."""

from typing import Annotated, Any, Literal

from trireme.config.section import After, Mapped, Refused, Section


class VerlTrainer(Section, defer_build=True):
    """verl's backend and its options."""

    trainer_type: Annotated[
        Literal["torch", "verl", "verl_legacy", "tinker"],
        After("name"),
        Refused(values={"tinker": "is not supported yet: expected torch or verl"}),
    ] = "verl"
    """Training backend; torch and verl both mean Trireme's own."""
    trainer_strategy: Annotated[
        Literal["fsdp", "fsdp2", "megatron"],
        After("trainer_type"),
        Mapped(
            "one process trains, so nothing is sharded",
            on="spread",
            among_ranks={"megatron": "FSDP2 shards the model in its place"},
        ),
    ] = "fsdp"
    """How weights are spread over ranks: always by FSDP2; one process spreads nothing."""
    megatron: Annotated[
        dict[str, Any],
        After("balance_batch"),
        Mapped("FSDP2 shards the weights, whatever Megatron's options say"),
    ] = {}
    """Options of a Megatron trainer."""
    trainer_config: Annotated[dict[str, Any], Mapped("is read key by key")] = {}
    """Options of verl, as it spells them: docs/migrate/verl.md says what each is read as."""
    trainer_config_path: Annotated[
        str, Refused("is not read: write what this file holds under trainer.trainer_config")
    ] = ""
    """A file of verl's options."""
