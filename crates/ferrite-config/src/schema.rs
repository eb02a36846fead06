//! The JSON schema of `ferrite.toml`, for editors.

use serde_json::{Map, Value, json};

use crate::kind::Kind;
use crate::setting::{AliasForm, Program, Setting};
use crate::{Value as SettingValue, table, time};

/// Returns the schema. Keys of other RDMA software are part of it, and marked as deprecated.
#[must_use]
pub fn schema() -> Value {
    let mut root = section();
    for setting in table::all().filter(|setting| !setting.key.is_empty()) {
        let (path, name) = setting.key.rsplit_once('.').unwrap_or(("", setting.key));
        insert(&mut root, path, name, property(setting));
        // These keys may also stand in [network.rdma], because other software has all its names in
        // one place.
        if path == "network" && name.starts_with("rdma_") {
            let mut property = property(setting);
            property["deprecated"] = json!(true);
            insert(&mut root, "network.rdma", name, property);
        }
        for alias in setting.aliases {
            let mut property = match alias.form {
                AliasForm::Same => property(setting),
                AliasForm::Mebibytes => json!({"type": "integer", "minimum": 0}),
                AliasForm::Words(words) => {
                    json!({"enum": words.iter().map(|(word, _)| *word).collect::<Vec<_>>()})
                }
            };
            property["description"] = json!(format!("Another name of {}.", setting.key));
            property["deprecated"] = json!(true);
            insert(&mut root, "network.rdma", alias.name, property);
        }
    }
    let line = json!({"type": ["string", "number", "boolean"]});
    root["properties"]["engine"] = json!({
        "type": "object",
        "description": "Lines of the engine's own configuration.",
        "additionalProperties": {"anyOf": [line, {"type": "array", "items": line}]},
    });
    root["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    root["title"] = json!("ferrite.toml");
    root
}

fn section() -> Value {
    json!({"type": "object", "properties": {}, "additionalProperties": false})
}

fn insert(root: &mut Value, path: &str, name: &str, property: Value) {
    let mut at = root;
    for part in path.split('.').filter(|part| !part.is_empty()) {
        at = at["properties"]
            .as_object_mut()
            .unwrap_or_else(|| unreachable!("sections have properties"))
            .entry(part)
            .or_insert_with(section);
    }
    at["properties"][name] = property;
}

fn property(setting: &Setting) -> Value {
    let mut property = match &setting.kind {
        Kind::Switch => json!({"type": "boolean"}),
        Kind::Number { min, max } => json!({"type": "integer", "minimum": min, "maximum": max}),
        Kind::Size { min, max } => json!({"anyOf": [
            {"type": "integer", "minimum": min, "maximum": max},
            {"type": "string", "pattern": "^[0-9]+([kKmMgG]([iI]?[bB])?|[bB])?$"},
        ]}),
        Kind::Time { bare, min, max } => {
            let units: Vec<_> = time::UNITS.iter().map(|(name, _)| *name).collect();
            let pattern = format!("^[0-9]+(\\.[0-9]+)?({})$", units.join("|"));
            let text = json!({"type": "string", "pattern": pattern});
            match bare {
                Some(unit) => json!({"anyOf": [
                    {"type": "integer", "minimum": unit.count(*min), "maximum": unit.count(*max)},
                    text,
                ]}),
                None => text,
            }
        }
        Kind::Choice(choices) => json!({"enum": choices}),
        Kind::Text(_) => json!({"type": "string", "minLength": 1}),
        Kind::List(_) => json!({"anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
        ]}),
    };
    property["description"] = json!(setting.meaning);
    if let Some(default) = default(setting) {
        property["default"] = default;
    }
    property
}

/// Returns the default of `ferrite server`, as the file writes it. Returns `None` if the setting
/// has no default there, or the server does not have the setting.
fn default(setting: &Setting) -> Option<Value> {
    let program = setting.programs.iter().copied().find(|program| *program == Program::Server)?;
    Some(match setting.parse(setting.default_in(program)).ok()? {
        SettingValue::Switch(is_on) => json!(is_on),
        SettingValue::Number(number) => json!(number),
        SettingValue::List(words) if words.is_empty() => return None,
        SettingValue::List(words) => json!(words),
        value => json!(value.to_string()),
    })
}

/// Returns all keys that the schema allows, with their sections.
#[must_use]
pub fn keys(schema: &Value) -> Vec<String> {
    fn collect(properties: &Map<String, Value>, section: &str, found: &mut Vec<String>) {
        for (name, property) in properties {
            let full = if section.is_empty() { name.clone() } else { format!("{section}.{name}") };
            match property["properties"].as_object() {
                Some(inner) => collect(inner, &full, found),
                None => found.push(full),
            }
        }
    }
    let mut found = Vec::new();
    if let Some(properties) = schema["properties"].as_object() {
        collect(properties, "", &mut found);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schema_has_every_key_with_its_default() {
        let schema = schema();
        let found = keys(&schema);
        for setting in table::all().filter(|setting| !setting.key.is_empty()) {
            assert!(found.iter().any(|key| key == setting.key), "{}", setting.key);
        }
        let rdma = &schema["properties"]["network"]["properties"]["rdma"];
        assert_eq!(rdma["properties"]["cq_size"]["default"], 16_384);
        assert_eq!(rdma["properties"]["rx_size"]["default"], "64kb");
        assert_eq!(rdma["additionalProperties"], false);
        assert_eq!(rdma["properties"]["rdma_sq_size"]["deprecated"], true);
        assert_eq!(rdma["properties"]["rdma_port"]["deprecated"], true);
    }

    #[test]
    fn defaults_of_the_schema_are_valid_in_the_file() {
        let schema = schema();
        for setting in table::all().filter(|setting| !setting.key.is_empty()) {
            let pointer = setting.key.replace('.', "/properties/");
            let property = schema.pointer(&format!("/properties/{pointer}")).expect(setting.key);
            let Some(default) = property.get("default") else { continue };
            let (section, name) = setting.key.rsplit_once('.').expect("a section");
            let text = format!("[{section}]\n{name} = {default}");
            crate::file::read(Program::Server, &text).unwrap_or_else(|why| panic!("{why:?}"));
        }
    }
}
