"""The keywords of JSON Schema (drafts 4 to 2020-12), by what the engine can do with them."""

from __future__ import annotations

# Where subschemas stand.
SCHEMA_MAPS = frozenset({"properties", "patternProperties"})
SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SCHEMAS = frozenset({"items", "additionalItems", "additionalProperties"})  # `items` may also be a list

ENFORCED = (
    SCHEMA_MAPS
    | SCHEMA_LISTS
    | SCHEMAS
    | frozenset(
        {
            "$ref",
            "type",
            "enum",
            "const",
            "minLength",
            "maxLength",
            "pattern",
            "format",
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "exclusiveMaximum",
            "multipleOf",
            "minItems",
            "maxItems",
            "required",
            "minProperties",
            "maxProperties",
        }
    )
)

# Constraints that no mask enforces exactly yet.
REFUSED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "propertyNames",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
    }
)

# Refused keywords that constrain nothing unless one of these stands beside them.
NEEDS_COMPANION = {
    "if": frozenset({"then", "else"}),
    "then": frozenset({"if"}),
    "else": frozenset({"if"}),
    "minContains": frozenset({"contains"}),
    "maxContains": frozenset({"contains"}),
}

# Formats that the engine enforces; any other is an annotation.
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)

COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
