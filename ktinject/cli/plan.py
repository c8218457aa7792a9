"""`ktinject plan`: every decision about a model, with nothing done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktinject.cli import options
from ktinject.errors import PlanError

if TYPE_CHECKING:
    from ktinject.sglang.plan import ServerPlan

Machine = Annotated[
    list[str] | None,
    typer.Option(
        "--machine",
        metavar="DEVICE=SIZE,…",
        help="Plan for another machine with this memory, such as cpu=512GiB,cuda:0=24GiB.",
    ),
]
Explain = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="PATH",
        help="For this module, or those whose path matches a pattern: which rules were tried, why each did not match, "
        "and what became of it.",
    ),
]

KtMethod = Annotated[
    str | None,
    typer.Option(
        "--kt-method",
        metavar="NAME",
        help="Plan the experts that SGLang leaves to the CPU, as its option of this name packs them, and nothing else.",
    ),
]
KtNumGpuExperts = Annotated[
    int | None,
    typer.Option(
        "--kt-num-gpu-experts",
        metavar="N",
        help="With --kt-method: so many experts of each layer are on SGLang's GPU; default: none.",
    ),
]


def command(
    context_of: typer.Context,
    model: options.Model,
    rules: options.Rules = None,
    variables: options.Set = None,
    device: options.Device = None,
    budget: options.Budget = None,
    context: options.Context = None,
    ignore: options.Ignore = None,
    machine: Machine = None,
    dtype: options.RestDtype = "auto",
    explain: Explain = None,
    kt_method: KtMethod = None,
    kt_num_gpu_experts: KtNumGpuExperts = None,
    plugins: options.Plugins = None,
    as_json: options.AsJson = False,
) -> None:
    """Show which modules would be replaced by what, on which device, in how many bytes. Reads only headers.

    A plan that does not fit into memory is shown, and the exit code is 2.
    """
    import ktinject
    from ktinject.optimize import read_rules
    from ktinject.planning.explain import explain as explained

    if kt_method is not None or kt_num_gpu_experts is not None:
        with options.answers(as_json):
            _refuse_others(context_of)
            server = _plan_server(options.find_model(model), dtype, kt_method, kt_num_gpu_experts or 0)
        if as_json:
            options.show_json(server.to_dict())
        else:
            options.say(*server.lines())
        return
    with options.answers(as_json):
        options.load_plugins(plugins)
        folder = options.find_model(model)
        on_meta = options.build_on_meta(folder, dtype)
        arguments = options.arguments(on_meta.config, rules, variables, device, budget, context, ignore)
        del arguments["check_tensors"], arguments["tp"]  # of loading, and of several processes
        ruleset = read_rules(on_meta, arguments.pop("rules"), arguments.pop("variables"))
        made: ktinject.Plan | ktinject.KTInjectError
        try:
            made = ktinject.plan(
                on_meta,
                ruleset,
                checkpoint=folder,
                machine=options.parse_sizes(machine, "--machine"),
                **arguments,
            )
        except ktinject.KTInjectError as error:
            if explain is None:
                raise
            made = error
        told = None if explain is None else explained(on_meta, ruleset, explain, made)
    if told is not None:
        if as_json:
            options.show_json({"explained": [each.to_dict() for each in told]})
        else:
            options.say(*(line for each in told for line in each.lines()))
    if isinstance(made, ktinject.KTInjectError):
        raise made
    if told is None and as_json:
        options.show_json(made.to_dict())
    elif told is None:
        options.show(made)
    made.check()


_OF_SERVERS = ("model", "dtype", "kt_method", "kt_num_gpu_experts", "as_json")


def _refuse_others(context: typer.Context) -> None:
    """Rules, budgets and devices mean nothing to SGLang's experts. Raises PlanError."""
    names = {option.name: option.opts[0] for option in context.command.params}
    if found := [
        names[name]
        for name in context.params
        if name not in _OF_SERVERS
        and (source := context.get_parameter_source(name))
        and source.name != "DEFAULT"
    ]:
        raise PlanError(
            f"--kt-method: {', '.join(found)} cannot go with it: SGLang places everything but the experts of the CPU. "
            "Leave one of them out."
        )


def _plan_server(model: Path, dtype: str, method: str | None, num_gpu_experts: int) -> ServerPlan:
    from ktinject.sglang.plan import plan

    if method is None:
        raise PlanError("--kt-num-gpu-experts: it needs --kt-method. Name one, such as AMXINT4.")
    return plan(options.build_on_meta(model, dtype), str(model), method, num_gpu_experts)
