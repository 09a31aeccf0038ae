"""One sentence for a wrong command line."""

from __future__ import annotations

import click

_ELSEWHERE = {
    "--cap": ("--memory", "--max-memory"),
    "--ctx-size": ("--max-kv-size", "--num-ctx", "--n-ctx", "--context", "--context-size"),
    "--max-tokens": ("--n-predict", "--predict", "--num-predict", "--max-new-tokens"),
    "--prefill-step-size": ("-b", "--batch-size", "--ubatch-size"),
    "--repeat-penalty": ("--repetition-penalty",),
    "--system-prompt": ("--system",),
    "--temp": ("--temperature",),
    "--threads": ("-t",),
}
"""What mlx-lm, llama.cpp, ollama and transformers call an option."""

_HERE = {other: name for name, others in _ELSEWHERE.items() for other in others}


def sentence(error: click.UsageError) -> str:
    """What is wrong and what to do."""
    hint = f"see {error.ctx.command_path} --help" if error.ctx else ""
    if isinstance(error, click.NoSuchOption):
        return f"there is no option {error.option_name}; {_meant(error)}{hint}"
    what = error.format_message().rstrip(".")
    return f"{what}; {hint}" if hint else what


def _meant(error: click.NoSuchOption) -> str:
    """Which of the command's options were probably meant."""
    import difflib

    options = error.ctx.command.params if error.ctx else ()
    own = {name for option in options for name in option.opts if not vars(option).get("hidden")}
    spelled = error.option_name.replace("_", "-")
    name = _HERE.get(spelled, spelled)
    if name in own:
        return f"here it is called {name}, "
    longer = sorted(name for name in own if name.startswith(spelled))
    similar = longer or difflib.get_close_matches(spelled, sorted(own), n=1, cutoff=0.66)
    return f"perhaps {' or '.join(similar)} is meant, " if similar else ""
