"""The JSON Schema of rule files, for editors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktinject.rules.arguments import argument_schema
from ktinject.rules.files import VERSION
from ktinject.rules.language import KEEP
from ktinject.rules.roles import ROLES
from ktinject.rules.sources import bundled
from ktinject.rules.variables import REFERENCE

_LAYERS = r"^\s*[0-9]+(-[0-9]+)?\s*(,\s*[0-9]+(-[0-9]+)?\s*)*$"


def schema(config_classes: Mapping[str, type]) -> dict[str, Any]:
    """JSON Schema draft-07 of rule files whose operators have these config classes."""
    text = {"type": "string", "minLength": 1}
    configs = {**config_classes, KEEP: None}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"ktinject rules, version {VERSION}",
        "type": "object",
        "required": ["version"],
        "anyOf": [{"required": ["rules"]}, {"required": ["extends"]}],
        "additionalProperties": False,
        "properties": {
            "version": {"const": VERSION},
            "extends": {
                "description": "bundled rules, or a rule file's path relative to this file; its rules come after these",
                "anyOf": [{"enum": [*bundled()]}, text],
            },
            "model_types": {
                "description": "transformers model types that the file serves; without it, any",
                "type": "array",
                "minItems": 1,
                "items": text,
            },
            "variables": {
                "description": "values for ${variables.name}, which Python and the command line may override",
                "type": "object",
                "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
                "additionalProperties": {"type": ["string", "number", "boolean"]},
            },
            "rules": {
                "description": "the first rule that matches a module wins",
                "type": "array",
                "minItems": 1,
                "items": {"$ref": "#/definitions/rule"},
            },
        },
        "definitions": {
            "reference": {"type": "string", "pattern": REFERENCE},
            "rule": {
                "type": "object",
                "required": ["name", "match", "replace"],
                "additionalProperties": False,
                "properties": {
                    "name": {**text, "maxLength": 200},
                    "match": {"$ref": "#/definitions/match"},
                    "replace": {"$ref": "#/definitions/replace"},
                    "optional": {
                        "description": "whether it may match nothing",
                        "type": "boolean",
                        "default": False,
                    },
                },
            },
            "match": {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": False,
                "anyOf": [{"required": [key]} for key in ("path", "class", "role")],
                "properties": {
                    "path": {**text, "description": "a regular expression for the whole dotted path"},
                    "class": {
                        **text,
                        "description": "the name of the class or of a base, not an import path",
                    },
                    "role": _role("what the module is for"),
                    "inside": _role("the role of a module that it lies in"),
                    "layers": {
                        "description": "decoder layers: 3-60, 3, [3, 5, 7] or '3-10,20-30'",
                        "anyOf": [
                            {"type": "integer", "minimum": 0},
                            {"type": "string", "pattern": _LAYERS},
                            {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                            {"$ref": "#/definitions/reference"},
                        ],
                    },
                },
            },
            "replace": {
                "if": {"type": "object"},
                "then": {
                    "required": ["operator"],
                    "properties": {"operator": {"enum": sorted(configs)}},
                    "allOf": [_arguments(name, configs[name]) for name in sorted(configs)],
                },
                "else": {"const": KEEP},
            },
        },
    }


def _role(description: str) -> dict[str, Any]:
    named = [{"const": name, "description": meaning} for name, meaning in ROLES.items()]
    return {"description": description, "anyOf": [*named, {"$ref": "#/definitions/reference"}]}


def _arguments(operator: str, config_class: type | None) -> dict[str, Any]:
    arguments = argument_schema(config_class) if config_class else {}
    return {
        "if": {"properties": {"operator": {"const": operator}}, "required": ["operator"]},
        "then": {"additionalProperties": False, "properties": {"operator": True, **arguments}},
    }
