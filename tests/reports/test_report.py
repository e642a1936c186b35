from rich.console import Console

from lightning_memo.reports.tables import Measurement, comparison_table

MIB = 2**20
GIB = 2**30


def render(table, width=100):
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def row(text, start):
    """Cells of the one row whose first cell is `start`."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    (found,) = [cells[1:] for cells in rows if cells[0] == start]
    return found


def test_measurements_are_compared_with_the_first():
    rows = [
        Measurement(
            name="plain", step_seconds=2.0, step_memory_bytes=80 * GIB, host_bytes=0, tokens_per_second=32768.0
        ),
        Measurement(
            name="memo [0.5]", step_seconds=2.5, step_memory_bytes=20 * GIB, host_bytes=3 * GIB, tokens_per_second=26214
        ),
    ]
    text = render(comparison_table(rows))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "plain 2.00 s (1.00x) 80.0 GiB (1.00x) 0 B 32,768" in lines
    assert "memo [0.5] 2.50 s (1.25x) 20.0 GiB (0.25x) 3.0 GiB 26,214" in lines


def test_a_comparison_of_nothing_is_an_empty_table():
    assert comparison_table([]).row_count == 0
