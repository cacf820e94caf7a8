"""OpenAPI schemas of forms, and the descriptions of valid values that errors contain."""

from __future__ import annotations

from functools import cache

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from maskfx.serve.request import LORAS, NAME, NETS, REUSE

MODEL = (
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._-]{0,127})?"
    r"(:[A-Za-z0-9][A-Za-z0-9._-]{0,127})?$"
)
SIZE = r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"
WANTED = {  # what errors say instead of a pattern
    NAME: "a name of letters, digits, '.', '_' and '-', at most 128 characters long",
    MODEL: "the name of a model, such as NAME or OWNER/NAME, or MODEL:LORA",
    REUSE: "off, judge, or a relative change such as 0.1",
    LORAS: "NAME or NAME:WEIGHT, up to eight of them separated by commas",
    NETS: "none, or NAME or NAME:SCALE, up to sixteen of them separated by commas",
    SIZE: "WIDTHxHEIGHT up to 99999x99999, or auto",
}


class MultipartSchema(GenerateJsonSchema):
    """Schemas of multipart bodies, in which fields are files or text and never null."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        found = super().default_schema(schema)
        if found.get("default", 0) in (None, []):
            del found["default"]
        return found


class JsonSchema(GenerateJsonSchema):
    """Schemas of JSON bodies, in which images are `data:` URLs and null is a field not set."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
        return {"type": "string", "pattern": "^data:image/(png|jpeg|webp);base64,"}

    def list_schema(self, schema: core_schema.ListSchema) -> JsonSchemaValue:
        found = super().list_schema(schema)
        return {"anyOf": [found, found["items"]]}  # one value stands for a list of one

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        found = super().default_schema(schema)
        default = found.pop("default")
        more = {} if default is None else {"default": default}
        null: JsonSchemaValue = {"type": "null"}
        if null in found.get("anyOf", ()):
            return {**found, **more}
        return {"anyOf": [found, null], **more}


@cache
def schema_of(
    form: type[BaseModel], generator: type[GenerateJsonSchema] = MultipartSchema
) -> JsonSchemaValue:
    """Return the JSON schema of a form."""
    return form.model_json_schema(schema_generator=generator)


def wanted_of(schema: JsonSchemaValue) -> str:
    """Describe the values that a schema allows."""
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    if words is not None:
        return "one of " + ", ".join(words) if len(words) > 1 else str(words[0])
    if schema.get("pattern") in WANTED:
        return WANTED[schema["pattern"]]
    match schema["type"]:
        case "boolean":
            return "true or false"
        case "integer":
            return f"a whole number from {schema['minimum']} to {schema['maximum']}"
        case "number" if "exclusiveMinimum" in schema:
            return f"a number above {schema['exclusiveMinimum']:g}, at most {schema['maximum']:g}"
        case "number":
            return f"a number from {schema['minimum']:g}, at most {schema['maximum']:g}"
        case "array":
            least = schema.get("minItems")
            return f"given {f'{least} to' if least else 'at most'} {schema['maxItems']} times"
    if schema.get("format") == "binary":
        return "a file, or a data: URL"
    return f"text in UTF-8 of at most {schema['maxLength']} characters"
