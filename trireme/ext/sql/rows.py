"""Database: the rows of a database's table as a data set."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trireme.data.rows import DataSet, NoRows, Rows, refuse_halves
from trireme.log import hide_passwords
from trireme.text import from_json

ROW = "raw_task"
"""The column with a whole row as JSON, in tables that Trinity-RFT writes."""


class DatabaseTable:
    """The row source for tables of databases."""

    reproducible = False

    def takes(self, data: DataSet) -> bool:
        """Return whether the path is the address of a database."""
        return "://" in data.path

    def files(self, data: DataSet) -> list[Path]:
        """Return none: another program may change a table at any time."""
        return []

    def read(self, data: DataSet) -> Rows:
        """Read a table's rows. A table has one split, `train`."""
        if data.split_name != "train":
            reason = f"has no split '{data.split_name}': a table has only train"
            raise NoRows(data.path, reason)
        try:
            name, rows = table_rows(data.path, data.subset, data.otherwise)
        except ValueError as error:
            raise NoRows(data.path, str(error)) from error
        if not rows:
            raise NoRows(data.path, f"has no rows in the table '{name}': expected at least one")
        columns = dict.fromkeys(column for row in rows for column in row)
        return Rows(f"dataset '{hide_passwords(data.path)}' (table '{name}')", rows, columns)


def table_rows(
    url: str, table: str | None, otherwise: str | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Return a table's name and its rows, in the order of its key; `otherwise` is another possible
    name.

    Without a key the rows of SQLite are in insertion order, others in the order of all columns.

    Raises ValueError, continuing the sentence `dataset 'x' …`, if there is no such table.
    """
    from sqlalchemy import MetaData, Table, Text, cast, create_engine, inspect, select, text
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    known_as = hide_passwords(url)
    try:
        address = make_url(url)
        if address.get_backend_name() == "sqlite":  # which would make an empty one
            file = url.partition(":///")[2]
            if not Path(file).is_file():  # a name may contain characters with a meaning in URLs
                file = address.database or ""
            address = address.set(
                database=f"file:{quote(file)}", query={"mode": "ro", "uri": "true"}
            )
        elif address.drivername == "postgresql":
            address = address.set(drivername="postgresql+psycopg")
        engine = create_engine(address, json_deserializer=from_json)
    except (ArgumentError, SQLAlchemyError, ModuleNotFoundError) as error:
        raise ValueError(
            f"is not a database that can be read here ({known_as}): expected sqlite:///<file> or "
            f"postgresql://<user>@<host>/<database>: {error}"
        ) from error
    try:
        names = inspect(engine).get_table_names()
        if table is None:
            table = otherwise if otherwise in names else names[0] if len(names) == 1 else None
        if table not in names:
            has = ", ".join(names) or "none"
            asked = f"no table '{table}'" if table else "several tables, and subset_name names none"
            raise ValueError(f"has {asked}. Its tables: {has}")
        described = Table(table, MetaData(), autoload_with=engine)
        with engine.connect() as connection:
            order: list[Any] = list(described.primary_key.columns)
            if not order and address.get_backend_name() == "sqlite":
                order = [text("rowid")]
            elif not order:  # as text, since JSON has no order
                order = [cast(column, Text) for column in described.columns]
            found = connection.execute(select(described).order_by(*order))
            rows: list[dict[str, Any]] = []
            try:
                for row in found:
                    rows.append({k: _number(v) for k, v in row._mapping.items()})
            except ValueError as error:
                where = f"row {len(rows)}: {error}"
                raise ValueError(f"has a column whose text is not JSON: {where}") from error
    except SQLAlchemyError as error:
        reason = hide_passwords(str(getattr(error, "orig", None) or error))
        raise ValueError(f"cannot be read: {reason}") from error
    finally:
        engine.dispose()
    return table, [_row(row, n) for n, row in enumerate(rows)]


def _number(value: Any) -> Any:
    """Return a NUMERIC in the form of other data sets: 72.000 is 72, 0.50 is 0.5."""
    if not isinstance(value, Decimal):
        return value
    return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)


def _row(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the columns, or the content of the column `raw_task`."""
    whole = row.get(ROW)
    if whole is None:
        refuse_halves(row, f"row {number}")
        return row
    try:
        made = from_json(whole) if isinstance(whole, str | bytes) else whole
    except ValueError as error:
        raise ValueError(f"has a {ROW} that is not JSON: row {number}: {error}") from error
    if not isinstance(made, dict):
        raise ValueError(f"has a {ROW} that is not a row: {made!r:.60}")
    refuse_halves(made, f"row {number}")
    return made
