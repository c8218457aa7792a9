"""The rule language: YAML or dicts in, a `RuleSet` out, and which module gets which rule.

Pure: no torch, nothing imported because a file says so. Reading goes compose → document → files → language, and
`settings` and `variables` are filled in; `sources` finds the file and those that it extends. All problems are
collected (`wording.Problems`) and told at once. `assign`, `explain`, `check_arguments` and `schema` serve the plan and
the command line; `legacy` and `migrate` read the files of KTransformers 0.x.
"""

from ktinject.rules.arguments import argument_of, check_arguments, unknown_operator
from ktinject.rules.assign import Assignment, Module, assign
from ktinject.rules.excerpt import places, pointed
from ktinject.rules.explain import Explanation, explain
from ktinject.rules.language import KEEP, Match, Rule, RuleSet
from ktinject.rules.migrate import Migrated, migrate, read_legacy
from ktinject.rules.roles import ELSEWHERE, ROLES, HasRole
from ktinject.rules.schema import schema
from ktinject.rules.settings import parse_overrides
from ktinject.rules.sources import bundled, locate, parse, read

__all__ = [
    "ELSEWHERE",
    "KEEP",
    "ROLES",
    "Assignment",
    "Explanation",
    "HasRole",
    "Match",
    "Migrated",
    "Module",
    "Rule",
    "RuleSet",
    "argument_of",
    "assign",
    "bundled",
    "check_arguments",
    "explain",
    "locate",
    "migrate",
    "parse",
    "parse_overrides",
    "places",
    "pointed",
    "read",
    "read_legacy",
    "schema",
    "unknown_operator",
]
