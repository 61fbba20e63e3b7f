//! Compiles the protocol files, without protoc.

use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorSet};

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
    let reflection = PathBuf::from(std::env::var("OUT_DIR")?).join("moored.v1.bin");
    std::fs::write(&reflection, descriptors.encode_to_vec())?;
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
