//! The public API keeps what it has promised: no number, type or name of `proto/baseline.txt` changed or went away. What is new
//! is recorded in the file, so that it is kept from then on.

#![allow(clippy::unwrap_used)] // a test

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet, ServiceDescriptorProto,
};

/// The package of the public API; others in the descriptors are not ours.
const PACKAGE: &str = "moored.v1";

const REFRESH: &str = "cargo test -p api --test proto_baseline -- --ignored";

fn baseline() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto/baseline.txt")
}

/// The lines of the file.
fn recorded() -> BTreeSet<String> {
    let text = std::fs::read_to_string(baseline()).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn descriptors() -> FileDescriptorSet {
    FileDescriptorSet::decode(api::v1::DESCRIPTORS).unwrap()
}

/// One line for each message, field, enum, value, service and method.
fn lines_of(descriptors: &FileDescriptorSet) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    for file in descriptors.file.iter().filter(|file| file.package() == PACKAGE) {
        for message in &file.message_type {
            add_message(PACKAGE, message, &mut lines);
        }
        for described in &file.enum_type {
            add_enum(PACKAGE, described, &mut lines);
        }
        for service in &file.service {
            add_service(service, &mut lines);
        }
    }
    lines
}

fn add_message(within: &str, message: &DescriptorProto, lines: &mut BTreeSet<String>) {
    let name = format!("{within}.{}", message.name());
    lines.insert(format!("message {name}"));
    for field in &message.field {
        lines.insert(field_line(&name, message, field));
    }
    for range in &message.reserved_range {
        lines.extend((range.start()..range.end()).map(|number| format!("reserved {name} {number}")));
    }
    let reserved = message.reserved_name.iter();
    lines.extend(reserved.map(|field| format!("reserved {name} {field}")));
    for nested in &message.nested_type {
        add_message(&name, nested, lines);
    }
    for described in &message.enum_type {
        add_enum(&name, described, lines);
    }
}

/// `field moored.v1.Message.name = 3 optional string`.
fn field_line(message_name: &str, message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    let presence = match field.label() {
        Label::Repeated => "repeated ".to_owned(),
        _ if field.proto3_optional() => "optional ".to_owned(),
        _ => match field
            .oneof_index
            .and_then(|index| message.oneof_decl.get(index as usize))
        {
            Some(oneof) => format!("oneof {} ", oneof.name()),
            None => String::new(),
        },
    };
    let kind = match field.r#type() {
        Type::Message | Type::Enum | Type::Group => field.type_name().trim_start_matches('.').to_owned(),
        scalar => scalar.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
    };
    let packed = match field.options.as_ref().and_then(|options| options.packed) {
        Some(packed) => format!(" packed={packed}"),
        None => String::new(),
    };
    let (name, number) = (field.name(), field.number());
    format!("field {message_name}.{name} = {number} {presence}{kind}{packed}")
}

fn add_enum(within: &str, described: &EnumDescriptorProto, lines: &mut BTreeSet<String>) {
    let name = format!("{within}.{}", described.name());
    lines.insert(format!("enum {name}"));
    for value in &described.value {
        lines.insert(format!("value {name}.{} = {}", value.name(), value.number()));
    }
}

fn add_service(service: &ServiceDescriptorProto, lines: &mut BTreeSet<String>) {
    let name = format!("{PACKAGE}.{}", service.name());
    lines.insert(format!("service {name}"));
    for method in &service.method {
        let stream = |is_stream: bool| if is_stream { "stream " } else { "" };
        lines.insert(format!(
            "method {name}.{} {}{} -> {}{}",
            method.name(),
            stream(method.client_streaming()),
            method.input_type().trim_start_matches('.'),
            stream(method.server_streaming()),
            method.output_type().trim_start_matches('.'),
        ));
    }
}

/// The lines of one that the other lacks, for a message.
fn missing<'a>(of: &'a BTreeSet<String>, from: &BTreeSet<String>) -> Vec<&'a str> {
    let gone = of.iter().filter(|line| !from.contains(*line));
    gone.map(String::as_str).collect()
}

#[test]
fn nothing_of_the_api_changed_or_went_away() {
    let recorded = recorded();
    assert!(
        recorded.len() > 100,
        "proto/baseline.txt is not there, or not whole"
    );
    let current = lines_of(&descriptors());
    let gone = missing(&recorded, &current);
    assert!(
        gone.is_empty(),
        "clients that are in use rely on these, which proto/ has no longer, or has otherwise:\n  {}\nKeep them, and give what \
         is new a number of its own. Where they must go (a new version of the API), take their lines out of \
         proto/baseline.txt by hand.",
        gone.join("\n  ")
    );
}

#[test]
fn additions_to_the_api_are_recorded() {
    let (recorded, current) = (recorded(), lines_of(&descriptors()));
    let new = missing(&current, &recorded);
    assert!(
        new.is_empty(),
        "these are new in proto/:\n  {}\nRecord them in proto/baseline.txt, so that they are kept: {REFRESH}",
        new.join("\n  ")
    );
}

/// Writes the file. It takes no line out: what went away is for a person to decide.
#[test]
#[ignore = "it writes proto/baseline.txt"]
fn record_what_is_new() {
    let all: Vec<String> = recorded().union(&lines_of(&descriptors())).cloned().collect();
    std::fs::write(baseline(), all.join("\n") + "\n").unwrap();
}

/// A change to the descriptors.
type Change = fn(&mut FileDescriptorSet);

/// The first message with a field, and the first enum, of the API.
fn first_message(descriptors: &mut FileDescriptorSet) -> &mut DescriptorProto {
    let ours = descriptors
        .file
        .iter_mut()
        .filter(|file| file.package() == PACKAGE);
    let mut messages = ours.flat_map(|file| &mut file.message_type);
    messages.find(|message| !message.field.is_empty()).unwrap()
}

fn first_enum(descriptors: &mut FileDescriptorSet) -> &mut EnumDescriptorProto {
    let ours = descriptors
        .file
        .iter_mut()
        .filter(|file| file.package() == PACKAGE);
    ours.flat_map(|file| &mut file.enum_type).next().unwrap()
}

fn first_service(descriptors: &mut FileDescriptorSet) -> &mut ServiceDescriptorProto {
    let ours = descriptors
        .file
        .iter_mut()
        .filter(|file| file.package() == PACKAGE);
    ours.flat_map(|file| &mut file.service).next().unwrap()
}

/// Each kind of change that breaks clients takes a line away.
#[test]
fn a_change_of_any_kind_is_seen() {
    let changes: [(&str, Change); 11] = [
        ("a field's number", |all| {
            first_message(all).field[0].number = Some(999)
        }),
        ("a field's name", |all| {
            first_message(all).field[0].name = Some("other".into())
        }),
        ("a field's type", |all| {
            let field = &mut first_message(all).field[0];
            field.type_name = None;
            field.set_type(Type::Sfixed64);
        }),
        ("a field's label", |all| {
            let field = &mut first_message(all).field[0];
            let is_repeated = field.label() == Label::Repeated;
            field.set_label(if is_repeated {
                Label::Optional
            } else {
                Label::Repeated
            });
        }),
        ("a field that is gone", |all| {
            first_message(all).field.remove(0);
        }),
        ("a message's name", |all| {
            first_message(all).name = Some("Other".into())
        }),
        ("a value's number", |all| {
            first_enum(all).value[0].number = Some(999)
        }),
        ("a value's name", |all| {
            first_enum(all).value[0].name = Some("OTHER".into())
        }),
        ("a method's answer", |all| {
            first_service(all).method[0].output_type = Some(".other".into());
        }),
        ("a method that streams", |all| {
            let method = &mut first_service(all).method[0];
            method.server_streaming = Some(!method.server_streaming());
        }),
        ("a service that is gone", |all| {
            let name = first_service(all).name.clone();
            for file in &mut all.file {
                file.service.retain(|service| service.name != name);
            }
        }),
    ];
    let recorded = lines_of(&descriptors());
    for (what, change) in changes {
        let mut changed = descriptors();
        change(&mut changed);
        assert!(!missing(&recorded, &lines_of(&changed)).is_empty(), "{what}");
    }
    let mut with_more = descriptors();
    let field = FieldDescriptorProto {
        name: Some("new".into()),
        number: Some(1_000),
        r#type: Some(Type::String as i32),
        ..FieldDescriptorProto::default()
    };
    first_message(&mut with_more).field.push(field);
    let current = lines_of(&with_more);
    assert!(missing(&recorded, &current).is_empty(), "an addition is allowed");
    assert_eq!(missing(&current, &recorded).len(), 1);
}
