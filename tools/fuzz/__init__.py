"""Fuzzing of everything that reads bytes from clients, files or other processes: `python -m tools.fuzz`, `make fuzz`.

    target.py       what a target is: a parser, the errors it may raise, its bounds
    targets/        one file per target
    guard.py        runs one input: undocumented errors, more than 1 s, too much memory, and leaked files are findings
    child.py        a process that fuzzes one target, guided by coverage (`atheris`)
    runner.py       starts children, collects their findings and figures
    coverage.py     lines that inputs reach, and the smallest set of inputs that reaches the same
    corpus.py       the inputs kept in the repository: tests/data/fuzz/TARGET.zip

The fast tests replay the corpus through the guard (`tests/tools/test_fuzz.py`); that needs neither processes nor
`atheris`.
"""
