"""The keywords of JSON Schema (drafts 4 to 2020-12), by what they hold and by who can enforce them."""

from __future__ import annotations

# Where subschemas stand. Lists and maps of other things than subschemas are not followed.
SCHEMA_MAPS = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}
)
SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SCHEMAS = frozenset(
    {
        *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
        *("contains", "propertyNames", "not", "if", "then", "else"),
    }
)
DEFINITIONS = frozenset({"$defs", "definitions"})

# Keywords that the engine takes; the other constraints are rewritten into these (see rewrite.py).
EASY = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties"),
        *("maxProperties", "prefixItems", "items", "minItems", "maxItems", "allOf", "anyOf", "$ref"),
        *("type", "enum", "const", "minLength", "maxLength", "pattern", "format", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
HARD = (
    *("oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "propertyNames"),
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
)
# Read as one of the above.
RENAMED = frozenset({"additionalItems", "dependencies", "$dynamicRef"})
REFUSED = frozenset({"$recursiveRef", "$recursiveAnchor"})

# Those that never constrain; by a custom of many tools also whatever begins with "x-".
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "$comment", "$schema", "$id", "id", "$anchor"),
        *("$dynamicAnchor", "$vocabulary", "readOnly", "writeOnly", "deprecated", "contentEncoding"),
        *("contentMediaType", "contentSchema"),
    }
)
KNOWN = EASY | frozenset(HARD) | RENAMED | REFUSED | DEFINITIONS | ANNOTATIONS

# Keywords that constrain nothing unless one of these stands beside them.
NEEDS_COMPANION = {
    "if": frozenset({"then", "else", "unevaluatedItems", "unevaluatedProperties"}),
    "then": frozenset({"if"}),
    "else": frozenset({"if"}),
    "minContains": frozenset({"contains"}),
    "maxContains": frozenset({"contains"}),
}

# Formats that masks enforce; any other is an annotation.
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)

BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
COUNTS = frozenset(
    {
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minContains", "maxContains"),
    }
)
