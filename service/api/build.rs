//! Compiles the protocol files, without protoc.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

/// The messages of the public API, which are JSON with the names of their fields.
fn messages(files: &FileDescriptorSet) -> impl Iterator<Item = &DescriptorProto> {
    let ours = files.file.iter().filter(|file| file.package() == "moored.v1");
    ours.flat_map(|file| &file.message_type)
}

/// The fields that JSON has in another form, and what writes it: of bytes their number, of times their seconds, of priorities
/// their names.
fn written_otherwise(files: &FileDescriptorSet) -> Vec<(String, &'static str)> {
    let fields = messages(files).flat_map(|message| {
        let fields = message.field.iter();
        fields.map(move |field| (format!(".moored.v1.{}.{}", message.name(), field.name()), field))
    });
    fields
        .filter_map(|(name, field)| match (field.r#type(), field.proto3_optional()) {
            (Type::Bytes, false) => Some((name, "length")),
            (Type::Bytes, true) => Some((name, "length_if_any")),
            (Type::Enum, _) if field.type_name() == ".moored.v1.Priority" => Some((name, "priority")),
            (Type::Message, _) if field.type_name() == ".google.protobuf.Duration" => Some((name, "seconds")),
            _ => None,
        })
        .collect()
}

/// The implementations of `Enums`: each message looks at its own fields, and at the messages in them that have enums.
fn looks_at_enums(files: &FileDescriptorSet) -> String {
    let all: BTreeMap<String, &DescriptorProto> = messages(files)
        .map(|message| (format!(".moored.v1.{}", message.name()), message))
        .collect();
    let mut with_enums: BTreeSet<&str> = BTreeSet::new();
    loop {
        let has_enums = |field: &FieldDescriptorProto| match field.r#type() {
            Type::Enum => true,
            Type::Message => with_enums.contains(field.type_name()),
            _ => false,
        };
        let found = all
            .iter()
            .filter(|(_, message)| message.field.iter().any(has_enums));
        let found: BTreeSet<&str> = found.map(|(name, _)| name.as_str()).collect();
        if found == with_enums {
            break;
        }
        with_enums = found;
    }
    let implementations = all.values().map(|message| {
        let looks = message
            .field
            .iter()
            .filter_map(|field| look_at(message, field, &with_enums));
        let looks = looks.collect::<String>();
        let body = match looks.is_empty() {
            true => String::new(),
            false => {
                format!("fn unknown_numbers(&self, at: &str, found: &mut Vec<UnknownNumber>) {{\n{looks}}}\n")
            }
        };
        format!("impl Enums for crate::v1::{} {{\n{body}}}\n", message.name())
    });
    implementations.collect()
}

/// The look at one field; `None` for one without enums.
fn look_at(
    message: &DescriptorProto,
    field: &FieldDescriptorProto,
    with_enums: &BTreeSet<&str>,
) -> Option<String> {
    let (name, type_name) = (field.name(), field.type_name());
    let look = match field.r#type() {
        Type::Enum => {
            let of = type_name.strip_prefix(".moored.v1.")?;
            format!("look_at_number::<crate::v1::{of}>(*each, format!(\"{{at}}PLACE\"), found);")
        }
        Type::Message if with_enums.contains(type_name) => {
            "each.unknown_numbers(&format!(\"{at}PLACE.\"), found);".to_owned()
        }
        _ => return None,
    };
    let one = look.replace("PLACE", name);
    let of_many = look.replace("PLACE", &format!("{name}[{{index}}]"));
    if field.oneof_index.is_some() && !field.proto3_optional() {
        let one_of = message.oneof_decl[field.oneof_index() as usize].name();
        let path = format!("crate::v1::{}::{}", snake(message.name()), camel(one_of));
        return Some(format!(
            "if let Some({path}::{}(each)) = &self.{one_of} {{ {one} }}\n",
            camel(name)
        ));
    }
    Some(match (field.label(), field.r#type()) {
        (Label::Repeated, _) => {
            format!("for (index, each) in self.{name}.iter().enumerate() {{ {of_many} }}\n")
        }
        (_, Type::Enum) if !field.proto3_optional() => {
            format!("{{ let each = &self.{name}; {one} }}\n")
        }
        _ => format!("if let Some(each) = &self.{name} {{ {one} }}\n"),
    })
}

/// `GenerateImage` as `generate_image`.
fn snake(name: &str) -> String {
    let mut snake = String::new();
    for character in name.chars() {
        if character.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(character.to_ascii_lowercase());
    }
    snake
}

/// `replace_model` as `ReplaceModel`.
fn camel(name: &str) -> String {
    let words = name.split('_').map(|word| {
        let mut letters = word.chars();
        let first = letters.next().map(|first| first.to_ascii_uppercase());
        first.into_iter().chain(letters).collect::<String>()
    });
    words.collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let root = "../../proto";
    println!("cargo:rerun-if-changed={root}");
    let public = [
        "model",
        "events",
        "errors",
        "generation",
        "residency",
        "jobs",
        "server",
        "hub",
    ]
    .map(|name| format!("{root}/moored/v1/{name}.proto"));
    let descriptors = protox::compile(&public, [root])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("moored.v1.bin"), descriptors.encode_to_vec())?;
    std::fs::write(out.join("enums.rs"), looks_at_enums(&descriptors))?;
    let mut code = tonic_prost_build::configure()
        .bytes(".")
        // An event of a job has its kind among its own fields: see `src/json.rs`.
        .type_attribute(
            ".moored.v1.Event.event",
            "#[derive(serde::Serialize)] #[serde(tag = \"event\", rename_all = \"snake_case\")]",
        );
    for message in messages(&descriptors).filter(|message| message.name() != "Event") {
        let name = format!(".moored.v1.{}", message.name());
        code = code.type_attribute(name, "#[derive(serde::Serialize)]");
    }
    for (field, writer) in written_otherwise(&descriptors) {
        code = code.field_attribute(
            field,
            format!("#[serde(serialize_with = \"crate::json::{writer}\")]"),
        );
    }
    code.compile_fds(descriptors)?;
    Ok(())
}
