"""Reads questions and answers from files and hub data sets, and reports faults in them.

The front matter of a data set's README may name the files of a split; otherwise, files with the
usual names are read. All files are Parquet or JSON lines.
"""

import ast
import glob
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slipstream.client.conversion import content_part, read_message
from slipstream.client.environment import Environment, Message
from slipstream.core.errors import ConfigError
from slipstream.core.hub import DATA_PREFIX, HubFiles
from slipstream.environments.answers import bare
from slipstream.environments.arguments import check_holds

# A text that may be the name of a data set on the hub.
_NAME = re.compile(r"[\w.-]+/[\w-]+")
SUFFIXES = (".parquet", ".jsonl")
# How Python reads the rows of other files from stdin.
_ROWS = {
    ".csv": "csv.DictReader(open(0, newline='', encoding='utf-8-sig'))",
    ".tsv": "csv.DictReader(open(0, newline='', encoding='utf-8-sig'), delimiter='\\t')",
    ".json": "json.load(open(0))",
}
# Advice by the ending of a file's name in small letters.
_LINES = "name it .jsonl if each line is an object"
_OTHER_NAMES = {".json": _LINES, ".jsonl": _LINES, ".ndjson": _LINES, ".gz": "unpack it by gunzip"}
# The start of messages that were written as text, as JSON, Python or numpy write them.
_MESSAGES = re.compile(
    r"""(?=.*['"](?:role|from)['"]\s*:)(?=.*['"](?:content|value)['"]\s*:)"""
    r"""\s*+(?:array\()?\[?\s*+\{\s*+['"](?:role|content|from|value)['"]\s*:""",
    re.DOTALL,
)
# Commands of LaTeX that JSON has read as a tab or another character and the rest of their names.
_LOST = re.compile(
    r"\f(?:rac|orall)|\x08(?:oxed|inom|eta|egin|ar\{)|\t(?:imes\b|heta\b|ext\{|frac)"
    r"|\n(?:eq\b(?! *[-+=.,:()\[\]*/])|abla\b)|\r(?:ight\b|ho\b)"
)
# Columns of chat formats that change what a reply answers, and have no place here.
UNREAD = (
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "documents",
    "functions",
    "system",
    "system_prompt",
    "chat_template_kwargs",
)
# Most files or columns that a message names.
MAX_SHOWN = 20
# Bounds of what a file may hold, whoever wrote it. A packed file may stand for any number of rows.
MAX_LINE_BYTES = 64 << 20
MAX_ROWS = 5_000_000
BATCH_ROWS = 256
MIN_TABLE_BYTES = 1 << 30
MAX_EXPANSION = 100
# Characters that steer a terminal or end a text, but for tabs and line breaks.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")

# A cell: text, or any value of JSON.
Cell: TypeAlias = Any
Row: TypeAlias = Mapping[str, Cell]


def files_of(paths: Iterable[object]) -> list[Path]:
    """Returns the files of paths and patterns such as data/*.jsonl, the latter in their order.

    Raises ConfigError if there is no path, or no file for a pattern.
    """
    file_names: list[str] = []
    for path in paths:
        if not isinstance(path, str | Path):
            raise ConfigError(
                f"path must be a file, a pattern, a list of these or of rows, got {path!r:.80}"
            )
        path = str(path)
        if path.startswith(DATA_PREFIX):
            raise ConfigError(f"a data set of the hub stands alone in path, got {path!r} in a list")
        is_pattern = glob.has_magic(path) and not Path(path).exists()
        matching = sorted(glob.glob(path, recursive=True)) if is_pattern else [path]
        if not matching:
            raise ConfigError(f"no file matches {path}; the working directory is {Path.cwd()}")
        file_names += matching
    if not file_names:
        raise ConfigError("path is an empty list; it must have files or rows")
    return [*map(Path, file_names)]


def hub_rows(
    name: str, config: str | None, split: str, revision: str | None
) -> Iterator[tuple[str, Row]]:
    """Yields the named rows of a split on the hub, whose files it downloads unless in the cache.

    None means the default config or newest revision. Raises ConfigError with one line if a download
    fails, if there is no file, or if a file has an unknown format. Nothing is downloaded before the
    first row is asked for.
    """
    data = HubFiles(name, "dataset", revision, shown=f"{DATA_PREFIX}{name}")
    readme = data.bring(["README.md"]) / "README.md"
    configs = []
    if readme.is_file():
        from huggingface_hub import metadata_load

        card_configs = (metadata_load(readme) or {}).get("configs", [])
        configs = [entry for entry in card_configs if isinstance(entry, dict)]
    patterns = _patterns(str(data), configs, config, split)
    folder = data.bring(patterns)
    data_files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    if not data_files or any(path.suffix not in SUFFIXES for path in data_files):
        what = f"config {config!r}, " if config else ""
        wrong = ", ".join(str(path.relative_to(folder)) for path in data_files[:MAX_SHOWN])
        raise ConfigError(
            f"{data} has no parquet or JSON lines for {what}split {split!r}"
            f"{f', only {wrong}' if wrong else ''}: write it as parquet and give the file as path"
        )
    yield from numbered(data, itertools.chain.from_iterable(map(read_rows, data_files)))


def _patterns(
    data: str,
    configs: list[dict[str, Any]],
    config: str | None,
    split: str,
) -> list[str]:
    """Returns glob patterns of the split's files: those named in `configs`, or the usual names.

    `data_files` of a config may have any form that the hub allows.
    """
    chosen_config = _chosen_config(data, configs, config)
    data_files = chosen_config.get("data_files")
    if data_files is not None:
        by_split = _paths_by_split(data_files)
        if split not in by_split:
            raise ConfigError(f"{data} has no split {split!r}; it has {', '.join(by_split)}")
        paths = by_split[split]
        return [str(path) for path in ([paths] if isinstance(paths, str) else paths)]
    data_folder = str(chosen_config.get("data_dir", "data")).strip("/")
    folders = [f"{folder}/" for folder in ([config, data_folder] if config else [data_folder])]
    stems = [f"{folder}{split}" for folder in ("", *folders)]
    return [f"{stem}{rest}{suffix}" for stem in stems for rest in ("", "-*") for suffix in SUFFIXES]


def _chosen_config(
    data: str, configs: list[dict[str, Any]], config: str | None
) -> Mapping[str, Any]:
    """Returns the config that a name chooses, or the default one; {} where the hub has none."""
    names = [str(entry.get("config_name", "default")) for entry in configs]
    name = config
    if name is None and len(names) > 1:
        defaults = [
            default_name
            for default_name, entry in zip(names, configs, strict=True)
            if entry.get("default")
        ]
        if not defaults and "default" not in names:
            raise ConfigError(f"{data} has the configs {', '.join(names)}: name one of them")
        name = defaults[0] if defaults else "default"
    if not configs:
        return {}
    if name is None:
        return configs[0]
    if name not in names:
        raise ConfigError(f"{data} has no config {name!r}; it has {', '.join(names)}")
    return configs[names.index(name)]


def _paths_by_split(data_files: object) -> dict[str, Any]:
    """Returns the paths of each split; files that name no split are those of "train"."""
    if isinstance(data_files, dict):
        return data_files
    if isinstance(data_files, list) and all(isinstance(entry, dict) for entry in data_files):
        return {str(entry["split"]): entry["path"] for entry in data_files}
    return {"train": data_files}


@dataclass(frozen=True)
class Question:
    """One row: what the model reads, and the right answer as text."""

    messages: tuple[Message, ...]
    # The right answer, or "" if no column has it.
    answer: str
    row: Row = field(default_factory=dict, compare=False, repr=False)
    # The answer as the file has it: a number stays a number.
    value: Cell = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The text of the last message, which asks the question."""
        return self.messages[-1].text

    @property
    def identity(self) -> str:
        """The roles and texts of all messages, by which a split knows the question."""
        return "\0".join(f"{message.role}\0{message.content}" for message in self.messages)


@dataclass(frozen=True)
class Columns:
    """How rows become questions, with the arguments of `Questions`; "a.b" is field b in column a.

    `answer` is None if no answer is read. `takes_any` says that an answer may be any value.
    """

    question: str = "question"
    answer: str | None = None
    answer_after: str | None = None
    takes_any: bool = False
    system: str | None = None
    instruction: str = "{question}"
    duplicates: Literal["refuse", "drop", "keep"] = "refuse"

    def question_in(self, row: Row, where: str) -> Question:
        """Returns the question in a row. Raises ConfigError, which names row and column."""
        place = f"{where}: column {self.question!r}"
        cell = cell_in(row, self.question, where)
        messages = messages_in(cell.strip() if isinstance(cell, str) else cell, place)
        check_read(row, {*UNREAD, "tools"} - {self.question, self.answer}, where)
        check_system(self.system, messages, place)
        if messages[-1].role == "assistant":
            raise ConfigError(f"{place} ends with a reply: the model is to give it")
        if len(messages) > 1 and self.instruction != "{question}":
            raise ConfigError(f"{place} holds messages, into which no instruction is put")
        if self.answer is None:
            return Question(messages, "", row)
        value = cell_in(row, self.answer, where)
        place = f"{where}: column {self.answer!r}"
        if self.takes_any and isinstance(value, list | Mapping):
            return Question(
                messages,
                json.dumps(value, default=str),
                row,
                value,
            )
        is_any = self.takes_any and not isinstance(value, str | float)
        text = str(value) if is_any else text_of(value, place).strip()
        if self.answer_after and self.answer_after in text:
            text = value = text.rpartition(self.answer_after)[2].strip()
        # Letters and digits alone are an answer; the rest takes a while for a million rows.
        if not (text.isalnum() or bare(text)):
            what = f"nothing behind {self.answer_after!r}" if self.answer_after else "only marks"
            raise ConfigError(f"{place} has {what}")
        return Question(messages, text, row, value)


def read_questions(rows: Iterable[tuple[str, Row]], columns: Columns) -> list[Question]:
    """Returns the questions of named rows in their order.

    If a row cannot be used, raises ConfigError, which names the row and the column.
    """
    first_rows: dict[str, tuple[str, Question]] = {}
    questions: list[Question] = []
    for where, row in rows:
        question = columns.question_in(row, where)
        question_key = repr(question.messages)
        if question_key not in first_rows or columns.duplicates == "keep":
            first_rows[question_key] = (where, question)
            questions.append(question)
        elif columns.duplicates == "refuse":
            first_where, first = first_rows[question_key]
            same = f"{first_where} and {where} ask the same question"
            if first.answer == question.answer:
                raise ConfigError(f"{same}; duplicates='drop' keeps the first")
            answers = f"{first.answer!r:.60} and {question.answer!r:.60}"
            raise ConfigError(f"{same} and answer it differently, {answers}: correct one of them")
    return questions


class Asked(Environment[Question]):
    """Asks questions, one reply each; a class below judges the replies."""

    def __init__(self, rows: Iterable[tuple[str, Row]], columns: Columns) -> None:
        """Reads the questions of named rows, with system prompt and instruction of `columns`.

        Raises ConfigError like `read_questions`, and for an instruction without the question.
        """
        check_holds("instruction", columns.instruction, "{question}")
        self._questions = read_questions(rows, columns)
        self._columns = columns
        # The question of the episode, and its messages.
        self.question = self._questions[0]
        self._asked = self._questions[0].messages

    def tasks(self) -> list[Question]:
        return self._questions

    def reset(self, task: Question) -> list[Message]:
        self.question = task
        self.expected_answer = task.answer
        *before, last = task.messages
        if not before and isinstance(last.content, str):
            instructed = self._columns.instruction.replace("{question}", last.content)
            last = replace(last, content=instructed)
        system = self._columns.system
        self._asked = (*before, last)
        return [*([] if system is None else [Message("system", system)]), *self._asked]


def named_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Returns the rows of a file as `numbered` does. Raises ConfigError, which names the fault."""
    return numbered(path, read_rows(path))


def numbered(source: object, rows: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    """Yields rows, each with its name in errors. Raises ConfigError without any."""
    number = 0
    for number, row in enumerate(rows, start=1):
        yield f"{source}, row {number}", row
    if not number:
        raise ConfigError(f"{source} has no rows")


def read_rows(path: Path) -> Iterable[Row]:
    """Returns the rows of a .jsonl or .parquet file.

    Raises ConfigError, which names the fault. A .jsonl file is read during the iteration, so a
    fault in it is raised then.
    """
    if not path.is_file():
        what = "is a pipe or a device, no regular file" if path.exists() else "does not exist"
        what = "is a folder, not a file" if path.is_dir() else what
        hint = f"; on the hub: {DATA_PREFIX}{path}" if _NAME.fullmatch(str(path)) else ""
        hint = _from_saved(path) or hint
        raise ConfigError(f"{path} {what}; the working directory is {Path.cwd()}{hint}")
    match path.suffix:
        case ".jsonl":
            return _json_lines(path)
        case ".parquet":
            return _parquet(path)
    what = f"the name of a file of questions ends in .jsonl or .parquet, got {path}"
    what += f"; {_OTHER_NAMES[kind]}" if (kind := path.suffix.lower()) in _OTHER_NAMES else ""
    if path.suffix in _ROWS:
        what += f"; {_conversion(path, path.suffix)}"
    raise ConfigError(what + _from_saved(path.parent))


def _conversion(path: Path, kind: str) -> str:
    """Returns the command that writes a file of `kind`, one of `_ROWS`, as JSON lines."""
    rows = f"import csv, json; print(*map(json.dumps, {_ROWS[kind]}), sep='\\n')"
    target = path.with_suffix(".jsonl")
    if target == path:
        target = path.with_name(f"{path.stem}-lines.jsonl")
    return f'convert it by: python -c "{rows}" < {path} > {target}'


def _from_saved(folder: Path) -> str:
    """Returns the command that converts what `save_to_disk` of datasets wrote, or ""."""
    for name, split in (("state.json", ""), ("dataset_dict.json", "['train']")):
        if (folder / name).is_file():
            saved = f"load_from_disk('{folder}'){split}.to_parquet('{folder}.parquet')"
            return f'; convert it by: python -c "from datasets import load_from_disk; {saved}"'
    return ""


def _json_lines(path: Path) -> Iterator[Row]:
    decoder = json.JSONDecoder(object_pairs_hook=_once)
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_BYTES:
                what = f"line {number} has more than {MAX_LINE_BYTES >> 20} MiB"
                raise ConfigError(f"{path}, {what}: is it one object a line?")
            if not line.strip():
                continue
            try:
                # Some editors begin a file with a byte order mark.
                row = decoder.decode(line.decode("utf-8-sig"))
                if b"\\ud" in line.lower():
                    # Half of a character, as JSON may write it, cannot be sent to a model.
                    json.dumps(row, ensure_ascii=False).encode()
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path} must be UTF-8, but line {number} is not") from error
            except UnicodeEncodeError as error:
                what = f"line {number} holds half of a character, {error.object[error.start]!a}"
                raise ConfigError(f"{path}, {what}") from error
            except (ValueError, RecursionError) as error:
                if number == 1 and line.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
                    what = "is one JSON list, not an object a line; "
                    raise ConfigError(f"{path} {what}{_conversion(path, '.json')}") from error
                raise ConfigError(f"{path}, line {number} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number} is no JSON object")
            yield row


def _once(pairs: list[tuple[str, Cell]]) -> dict[str, Cell]:
    """Returns the fields of an object. Raises ValueError if one stands there twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} stands twice in one object")
    return fields


def _parquet(path: Path) -> Sequence[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path} needs the package pyarrow: pip install pyarrow") from error
    rows: list[Row] = []
    most_bytes = max(MIN_TABLE_BYTES, MAX_EXPANSION * path.stat().st_size)
    size = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if file.metadata.num_rows > MAX_ROWS:
                what = f"has {file.metadata.num_rows} rows, and at most {MAX_ROWS} are read"
                raise ConfigError(f"{path} {what}: write it as several files")
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                name = max(names, key=names.count)
                raise ConfigError(f"{path} has several columns {name!r}: keep one of them")
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                columns = {
                    field.name: [_shortest(cell, field.type) for cell in cells.to_pylist()]
                    for field, cells in zip(batch.schema, batch.columns, strict=True)
                }
                size += batch.nbytes + sum(map(_text_bytes, columns.values()))
                if size > most_bytes:
                    what = f"{path.stat().st_size} bytes hold more than {most_bytes} bytes of rows"
                    raise ConfigError(f"{path}: {what}; write it without repetitions")
                cells_of_rows = zip(*columns.values(), strict=True)
                rows += [dict(zip(columns, cells, strict=True)) for cells in cells_of_rows]
    except ConfigError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        # Python's times have no nanoseconds.
        cause = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path} cannot be read: {cause}") from error
    return rows


def _text_bytes(cells: Sequence[Cell]) -> int:
    """Returns the characters of the texts in a column: a dictionary repeats them without bytes."""
    return sum(len(cell) for cell in cells if isinstance(cell, str | bytes))


def _shortest(cell: Cell, kind: Any) -> Cell:  # noqa: ANN401 - a type of pyarrow
    """Returns a cell in which numbers of 16 and 32 bits are their shortest decimals: 0.1 is 0.1."""
    from pyarrow import types

    if cell is None:
        return None
    if types.is_struct(kind):
        return {field.name: _shortest(cell[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return [(key, _shortest(item, kind.item_type)) for key, item in cell]
    if types.is_nested(kind):
        return [_shortest(item, kind.value_type) for item in cell]
    if types.is_float32(kind) or types.is_float16(kind):
        return float(str(kind.to_pandas_dtype()(cell)))
    return cell


def cell_in(row: Row, column: str, where: str) -> Cell:
    """Returns what stands in a column, or in a field of the objects in a column.

    Raises ConfigError, which names the columns, if there is none or it is empty. `where` names the
    row. Infinity is how a column of floats writes what was too large.
    """
    place: Cell = row
    for part in (column,) if column in row else column.split("."):
        if not isinstance(place, Mapping) or part not in place:
            names = [repr(name) for name in list(row)[:MAX_SHOWN]]
            raise ConfigError(
                f"{where} has no column {column!r}; its columns are {', '.join(names)}"
            )
        place = place[part]
    place = plain_cell(place)
    is_blank = isinstance(place, str) and not place.strip()
    if place in (math.inf, -math.inf):
        raise ConfigError(f"{where}: column {column!r} must hold a finite number, got {place}")
    if place is None or is_blank or place in ([], {}):
        raise ConfigError(f"{where}: column {column!r} is empty")
    return place


def plain_cell(cell: Cell) -> Cell:
    """Returns a cell without the forms of pandas: an array as a list, NaN, which says no value."""
    cell = cell.tolist() if hasattr(cell, "tolist") else cell
    return None if cell != cell else cell


def text_in(row: Row, column: str, where: str) -> str:
    """Returns the text in a column. Raises ConfigError without a text or a number."""
    return text_of(cell_in(row, column, where), f"{where}: column {column!r}")


def text_of(cell: Cell, where: str) -> str:
    """Returns a text, or a number as people write it.

    A whole number of a column of floats has no point. Raises ConfigError for any other value, and
    for a text in which JSON has read the beginning of LaTeX's commands as other characters.
    """
    is_lost = isinstance(cell, float | Decimal) and not math.isfinite(cell)
    if is_lost or isinstance(cell, bool) or not isinstance(cell, str | int | float | Decimal):
        got = f"got {str(cell)[:60]}: write its text"
        raise ConfigError(f"{where} must hold a text or a number, {got}")
    if isinstance(cell, str) and (escape := _LOST.search(cell)):
        got = f"holds {escape[0]!r}: in JSON a backslash of LaTeX is written twice"
        raise ConfigError(f"{where} {got}")
    if isinstance(cell, str) and (control := _CONTROL.search(cell)):
        got = f"holds the control character {control[0]!a}: take it out"
        raise ConfigError(f"{where} {got}")
    if isinstance(cell, float | Decimal) and cell == int(cell):
        cell = int(Decimal(str(cell)))
    return str(cell)


def messages_in(cell: Cell, where: str) -> tuple[Message, ...]:
    """Returns the messages in a cell: a list of them, a list as text, or the user's text.

    Raises ConfigError, which names the first field that cannot be read.
    """
    cell = unpacked(cell, where) if isinstance(cell, str) and _MESSAGES.match(cell) else cell
    if not isinstance(cell, list):
        return (Message("user", text_of(cell, where)),)
    messages = tuple(message_in(message, where) for message in cell)
    check_results(messages, where)
    return messages


def check_read(row: Row, unread: Iterable[str], where: str) -> None:
    """Raises ConfigError for a column of `unread` that holds something."""
    for name in sorted(row.keys() & unread):
        if plain_cell(row[name]) not in (None, "", "[]", [], {}, 1):
            got = f"got {str(row[name])[:60]}: leave it out, or name it otherwise"
            raise ConfigError(f"{where}: column {name!r} is not read, {got}")


def check_results(messages: Sequence[Message], where: str) -> None:
    """Raises ConfigError for a result of a tool whose call stands in no message before it."""
    called: set[str] = set()
    for message in messages:
        called |= {call.id for call in message.tool_calls}
        if message.tool_call_id and message.tool_call_id not in called:
            raise ConfigError(f"{where}: no call has the id {message.tool_call_id!r} of a result")


def message_in(cell: Cell, where: str, *, takes_any: bool = False) -> Message:
    """Returns the message in one object of a column. Raises ConfigError, which names the field.

    `takes_any` says that its text may hold control characters and torn commands of LaTeX.
    """
    try:
        message = read_message(cell)
        for part in () if isinstance(message.content, str) else message.content:
            # The file of an image is read when it is shown.
            if not isinstance(part, Mapping) or "path" not in part:
                content_part(part)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not takes_any:
        text_of(message.text, where)
    return message


def unpacked(text: str, where: str) -> list[Cell]:
    """Returns the list that a text is, in JSON or as Python writes it. Raises ConfigError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise ConfigError(
                f"{where} looks like a list, but cannot be read: "
                f"{str(error) or type(error).__name__}"
            ) from error
    if not isinstance(value, list):
        raise ConfigError(f"{where} looks like a list, and is a {type(value).__name__}")
    return value


def check_system(system: str | None, messages: Sequence[Message], where: str) -> None:
    """Raises ConfigError if messages that begin with a system message get a second one."""
    if system is not None and messages[0].role in ("system", "developer"):
        raise ConfigError(f"{where} begins with a {messages[0].role} message: leave out system")
