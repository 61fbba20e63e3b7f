//! The tables of the documents that say what the models of the catalogue need, and how they run on which card.

use std::fs;
use std::path::Path;

use model::Preset;
use residency::Bytes;

use super::planned::REFRESH;
use super::{Fit, Makes, Model, Room, all, find};

/// Sizes in GiB of cards that people have.
const CARDS: [u64; 8] = [48, 24, 16, 12, 10, 8, 6, 4];

/// A made table: the document, the comment before it, and its text. The comment `<!-- end -->` follows.
struct Table {
    document: &'static str,
    name: &'static str,
    text: String,
}

fn tables() -> [Table; 3] {
    let table = |document, name, text| Table { document, name, text };
    [
        table("README.md", "models", models()),
        table("README.md", "cards", cards()),
        table("docs/COMFYUI.md", "models", models_in_comfyui()),
    ]
}

fn lines(head: &[&str], rows: impl IntoIterator<Item = String>) -> String {
    let head = [
        format!("| {} |", head.join(" | ")),
        format!("|{}", "---|".repeat(head.len())),
    ];
    head.into_iter().chain(rows).collect::<Vec<_>>().join("\n")
}

/// A card of this size, on which the driver takes its share.
fn room(gib: u64) -> Room {
    Room::expected(Bytes::gib(gib), Bytes::mib(256))
}

fn gib(bytes: Bytes) -> String {
    format!("{:.1}", bytes.0 as f64 / (1 << 30) as f64)
}

/// A figure of each preset.
fn by_preset(model: &Model, figure: fn(&super::Needs) -> Bytes) -> String {
    let figures = Preset::ALL.map(|preset| gib(figure(model.needs(preset, false).unwrap())));
    figures.join(" / ")
}

/// What each model is, and what it needs.
fn models() -> String {
    let row = |model: &Model| {
        let login = if model.needs_terms { "; needs a login" } else { "" };
        format!(
            "| `{}` | {} | {}{login} | {:.0} GB | {} GiB | {} GiB |",
            model.name,
            model.in_words(),
            model.licence,
            model.download_gb,
            by_preset(model, super::Needs::whole),
            by_preset(model, super::Needs::least),
        )
    };
    let head = [
        "name",
        "what it is",
        "licence",
        "download",
        "card, full / 8-bit / 4-bit",
        "card, streamed",
    ];
    lines(&head, all().iter().map(row))
}

/// How a model runs on a card, in a table.
fn cell(model: &Model, room: &Room) -> String {
    match (model.best_in(room), model.smaller_in(None, room)) {
        (Some((preset, fit)), _) => fit.in_words(preset),
        (None, Some(label)) => format!("up to {label}"),
        (None, None) => "no".to_owned(),
    }
}

/// How models run on which card.
fn cards() -> String {
    let columns = [
        ("z-image-turbo", "pictures: Z-Image"),
        ("flux2-klein-4b", "pictures, edits: FLUX.2 klein 4B"),
        ("flux-dev", "pictures: FLUX.1"),
        ("qwen-image-edit", "edits: Qwen-Image"),
        ("framepack", "film from a picture: FramePack"),
        ("hunyuan-video", "film from text: HunyuanVideo"),
        ("ace-step", "music: ACE-Step"),
    ];
    let row = |size: u64| {
        let cells = columns.map(|(name, _)| cell(find(name).unwrap(), &room(size)));
        format!("| {size} GB | {} |", cells.join(" | "))
    };
    let head: Vec<&str> = ["card"]
        .into_iter()
        .chain(columns.map(|(_, head)| head))
        .collect();
    lines(&head, CARDS.map(row))
}

/// The smallest card on which this holds.
fn smallest(holds: impl Fn(&Room) -> bool) -> String {
    let fitting = CARDS.into_iter().filter(|size| holds(&room(*size)));
    fitting
        .min()
        .map_or("none".to_owned(), |size| format!("{size} GB"))
}

fn models_in_comfyui() -> String {
    let row = |model: &Model| {
        let makes = match (model.makes, model.name.as_str()) {
            (Makes::Video, "framepack" | "wan2.2-i2v-a14b") => "films from a start picture",
            (Makes::Video, "wan2.2-ti2v-5b") => "films from text or a start picture",
            (Makes::Video, name) if name.starts_with("ovi-") => {
                "films with sound, from text or a start picture"
            }
            (Makes::Video, _) => "films from text",
            (Makes::Image | Makes::Audio, _) => model.makes.in_words(),
        };
        let login = if model.needs_terms {
            "; the hub wants a login first"
        } else {
            ""
        };
        let is_whole = |fit: Option<Fit>| fit == Some(Fit::Whole);
        format!(
            "| `{}` | {makes}{login} | {:.0} GB | {} | {} | {} |",
            model.name,
            model.download_gb,
            smallest(|room| model.best_in(room).is_some()),
            smallest(|room| is_whole(model.best_in(room).map(|(_, fit)| fit))),
            smallest(|room| is_whole(model.fit(Preset::Full, room))),
        )
    };
    let head = [
        "`other_model`",
        "makes",
        "download",
        "smallest card",
        "nothing streamed",
        "in full",
    ];
    lines(&head, all().iter().map(row))
}

/// A document with this table in its place.
fn with_table(document: &str, table: &Table) -> String {
    let begin = format!("<!-- {} -->\n", table.name);
    let (before, rest) = document.split_once(&begin).unwrap();
    let (_, after) = rest.split_once("\n<!-- end -->").unwrap();
    format!("{before}{begin}{}\n<!-- end -->{after}", table.text)
}

/// Writes the tables into the documents below this folder.
pub(super) fn write(checkout: &Path) {
    for table in tables() {
        let path = checkout.join(table.document);
        let written = with_table(&fs::read_to_string(&path).unwrap(), &table);
        fs::write(path, written).unwrap();
    }
}

#[test]
fn the_tables_of_the_documents_are_the_catalogues() {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for table in tables() {
        let document = fs::read_to_string(checkout.join(table.document)).unwrap();
        let same = with_table(&document, &table) == document;
        assert!(same, "a table of {} is out of date: {REFRESH}", table.document);
    }
}
