"""Files of questions that cannot be used or do not fill a step, of which verl says so once Ray or its engines run."""

from pathlib import Path

from omegaconf import DictConfig

from verl_qerl.verl_plugin.config.nodes import paths_are_here, plain

_READ = (".parquet", ".json", ".jsonl")


def check_files(config: DictConfig) -> None:
    """Refuse such files with a ValueError; what is in those of other kinds than parquet is left to verl.

    Args:
        config: The whole configuration. Of files elsewhere, or for a data set of the user's own, nothing is said.
    """
    data = plain(config.data)
    if not paths_are_here(config) or data["custom_cls"]["path"]:
        return
    for name in ("val_files", "train_files"):
        given = data[name] if isinstance(data[name], list) else [data[name]]
        files = [str(file) for file in given if file]
        if not files:
            raise ValueError(
                f"data.{name}={data[name]} names no file, without which verl does not start. One of verl's schema, as"
                " `python -m verl_qerl data` writes it, is accepted. Name one; with trainer.test_freq=-1 and"
                " trainer.val_before_train=False nothing is asked of data.val_files."
            )
        for file in files:
            if not file.endswith(_READ):
                raise ValueError(
                    f"data.{name}={file} is of no kind that verl's data set reads. A name that ends in"
                    f" {', '.join(_READ)} is accepted. Name such a file, or a class of your own in data.custom_cls."
                )
            if "[" in file and Path(file).expanduser().exists():
                raise ValueError(
                    f"data.{name}={file} has brackets, which verl's data set takes for a pattern that does not fit this"
                    " file. A path without them is accepted. Rename the file or its folder."
                )
            if not (_is_elsewhere(file) or Path(file).expanduser().exists()):
                raise _unreadable(f"data.{name}", file, "there is no such file")
        if any(_is_elsewhere(file) or not file.endswith(".parquet") for file in files):
            continue
        count = sum(_num_rows(f"data.{name}", file, data["prompt_key"]) for file in files)
        if name == "train_files":
            limit = data["train_max_samples"]
            check_count(config, min(count, limit) if limit > 0 else count)


def check_count(config: DictConfig, count: int, which: str = "") -> None:
    """Refuse with a ValueError fewer questions than a step takes.

    Args:
        which: What those that are counted have in common.
    """
    if count < config.data.train_batch_size:
        raise ValueError(
            f"data.train_batch_size={config.data.train_batch_size} is more than the {count} questions{which} of"
            f" data.train_files={plain(config.data.train_files)}, so that there would be no step. As many questions are"
            " accepted, or more. Lower it, or give more."
        )


def _is_elsewhere(file: str) -> bool:
    """Whether it is an address, or a pattern."""
    return "://" in file or bool(set(file) & set("*?["))


def _unreadable(name: str, file: str, why: object) -> ValueError:
    return ValueError(
        f"{name}={file} cannot be read: {why}. A file of verl's schema, as `python -m verl_qerl data` writes it, is"
        " accepted. Check the path."
    )


def _num_rows(name: str, file: str, key: str) -> int:
    import pyarrow.parquet as pq

    try:
        found = pq.read_metadata(Path(file).expanduser())
    except (OSError, ValueError) as error:  # pyarrow's are
        raise _unreadable(name, file, error) from error
    columns = found.schema.to_arrow_schema().names
    if key not in columns:
        raise ValueError(
            f"{name}={file} has no column data.prompt_key={key}: it has {', '.join(columns)}. One with it, as `python"
            " -m verl_qerl data` writes one, is accepted. Name the column of the questions, or another file."
        )
    if not found.num_rows:
        raise ValueError(f"{name}={file} has no questions. A file with one or more is accepted. Name another.")
    return found.num_rows
