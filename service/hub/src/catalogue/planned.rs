//! Compares the catalogue with the planner. Checkpoints of the published shapes, of which only the headers are written, are opened and
//! planned like any other: their sizes are those of the catalogue, and on each card they run as the catalogue says.

use std::fmt::Write as _;
use std::fs;

use engine::admission::{Admission, choose_rung};
use engine::library::{Entry, Library, OpenModel};
use engine::need::Need;
use gpu::{CardDescription, CardKind, Uses};
use pipelines::{Medium, Preset, Quantization, Request, Role, StagePlan};
use residency::{Bytes, Component, Ledger, Millis, Policy, part_after};
use tempfile::TempDir;

use super::needs::{ComponentSizes, EqualBlocks, RequestSizes, Sizes, StageSizes, all_sizes};
use super::published::{checkout, write_model};
use super::{Extent, Fit, Model, Room, all, tables};

/// A model as it is opened for cards that compute in one dtype.
struct Opened {
    name: String,
    preset: Preset,
    is_f32: bool,
    open: OpenModel,
}

/// All models of the catalogue, in all presets and dtypes. The folders have their checkpoints.
fn opened(folders: &mut Vec<TempDir>) -> Vec<Opened> {
    let library = Library::new(pipelines::families(), None);
    let mut opened = Vec::new();
    for model in all() {
        let root = TempDir::new().unwrap();
        let folder = root.path().join("it");
        fs::create_dir(&folder).unwrap();
        let path = write_model(&model.name, &folder);
        for is_f32 in [false, true] {
            for preset in Preset::ALL {
                let formats = Quantization::preset(preset);
                let entry = Entry::new(String::new(), String::new(), path.clone(), formats);
                let open = library.open(&entry, &card(is_f32)).unwrap();
                opened.push(Opened {
                    name: model.name.clone(),
                    preset,
                    is_f32,
                    open,
                });
            }
        }
        folders.push(root);
    }
    opened
}

fn card(is_f32: bool) -> CardDescription {
    CardDescription {
        id: String::new(),
        kind: CardKind::Simulated,
        name: String::new(),
        total: Bytes::ZERO,
        compute_capability: None,
        compute_dtype: if is_f32 { "f32" } else { "bf16" }.to_owned(),
        peers: gpu::Peers::none(),
    }
}

impl Opened {
    fn default_request(&self) -> Request {
        let model = &self.open.model;
        model.with_required_pictures(model.defaults())
    }

    /// The needs of the stages of a request.
    fn needs_of(&self, request: &Request) -> Vec<Need> {
        let stages = self.open.model.plan(request).unwrap();
        let need = |plan: StagePlan| Need {
            name: plan.name.as_str().into(),
            components: self.components_of(&plan).cloned().collect(),
            plan: Some(plan),
            headroom: Bytes::ZERO,
            later: Vec::new(),
            model: Vec::new(),
        };
        stages.into_iter().map(need).collect()
    }

    fn components_of(&self, plan: &StagePlan) -> impl Iterator<Item = &Component> {
        let named = |component: &&Component| plan.components.contains(&component.name);
        self.open.components.iter().filter(named)
    }

    /// What the catalogue has of it.
    fn sizes(&self) -> Sizes {
        let request = self.default_request();
        let mut stages: Vec<StageSizes> = Vec::new();
        for need in self.needs_of(&request) {
            let stage = stage_sizes(&need);
            if !stages.contains(&stage) {
                stages.push(stage);
            }
        }
        let smaller = self.open.model.smaller(&request);
        let requests = std::iter::once((String::new(), request)).chain(smaller);
        Sizes {
            model: self.name.clone(),
            preset: self.preset.as_str().to_owned(),
            is_f32: self.is_f32,
            components: self
                .open
                .components
                .iter()
                .map(|component| self.component_sizes(component))
                .collect(),
            stages,
            requests: requests
                .map(|(label, request)| RequestSizes {
                    label,
                    extent: extent_of(&request),
                    least: self.needs_of(&request).iter().map(least_of).max().unwrap().0,
                })
                .collect(),
        }
    }

    fn component_sizes(&self, component: &Component) -> ComponentSizes {
        let mut blocks: Vec<EqualBlocks> = Vec::new();
        for block in self.open.model.load_plan(&component.name).unwrap().blocks() {
            let one = EqualBlocks {
                count: 1,
                bytes: block.bytes.0,
                in_ring: block.in_ring.0,
                once: block.uses == Uses::Once,
            };
            match blocks.last_mut() {
                Some(last)
                    if *last
                        == (EqualBlocks {
                            count: last.count,
                            ..one.clone()
                        }) =>
                {
                    last.count += 1
                }
                _ => blocks.push(one),
            }
        }
        ComponentSizes {
            name: component.name.clone(),
            bytes: component.bytes.0,
            blocks,
        }
    }
}

fn extent_of(request: &Request) -> Extent {
    let pixels = |width: u32, height: u32| Some(u64::from(width) * u64::from(height));
    match &request.medium {
        Medium::Image(image) => Extent {
            pixels: pixels(image.width, image.height),
            ..Extent::default()
        },
        Medium::Video(video) => Extent {
            pixels: pixels(video.width, video.height),
            frames: Some(video.frames),
            seconds: None,
        },
        Medium::Audio(audio) => Extent {
            seconds: Some(audio.seconds),
            ..Extent::default()
        },
    }
}

/// How stages run on a card, as the queue decides it for each of them.
fn fit_on(needs: &[Need], room: &Room) -> Option<Fit> {
    let ledger = Ledger::new(room.bytes, Bytes::ZERO);
    let mut most = Bytes::ZERO;
    for need in needs {
        let Admission::Run { moves, .. } = choose_rung(&ledger, need, Policy::Shared, Millis(0)) else {
            return None;
        };
        let part = |c: &Component| c.size_of(part_after(&ledger, &moves, c)).streamed;
        if need.on_rung(0, None).passes > 1 {
            most = most.max(need.components.iter().map(part).sum());
        }
    }
    Some(match most {
        Bytes::ZERO => Fit::Whole,
        each_step => Fit::Streamed { each_step },
    })
}

fn stage_sizes(need: &Need) -> StageSizes {
    let plan = need.plan.as_ref().unwrap();
    // Exact ways are tried before approximate ones.
    // A card need not have the memory for copies: they are kept where it is free.
    let needed = plan.rungs.iter().filter(|rung| rung.copies.is_empty());
    let (approximate, exact): (Vec<_>, Vec<_>) = needed.partition(|rung| rung.approximate);
    StageSizes {
        name: plan.name.clone(),
        components: need.components.iter().map(|c| c.name.clone()).collect(),
        passes: need.on_rung(0, None).passes,
        scratch: exact
            .into_iter()
            .chain(approximate)
            .map(|rung| rung.scratch.0)
            .collect(),
    }
}

/// The least that a stage needs of a card, in any way to run it.
fn least_of(need: &Need) -> Bytes {
    let ways = 0..need.rungs().len();
    ways.map(|rung| need.on_rung(rung, None).least_peak())
        .min()
        .unwrap()
}

/// Cards on which the catalogue and the planner are compared.
fn rooms(is_f32: bool) -> impl Iterator<Item = Room> {
    let mib = (0..16 << 10)
        .step_by(384)
        .chain((16 << 10..96 << 10).step_by(4096));
    mib.map(move |mib| Room {
        bytes: Bytes::mib(mib),
        is_f32,
        is_cpu: false,
    })
}

#[test]
fn the_catalogue_and_the_planner_say_the_same() {
    let mut folders = Vec::new();
    let opened = opened(&mut folders);
    let sizes: Vec<Sizes> = opened.iter().map(Opened::sizes).collect();
    assert!(
        sizes == all_sizes(),
        "catalogue/sizes.toml is not what the planner says: {REFRESH}"
    );
    for one in &opened {
        let model: &Model = super::find(&one.name).unwrap();
        let needs = model.needs(one.preset, one.is_f32).unwrap();
        let of_stages = one.needs_of(&one.default_request());
        assert_eq!(
            needs.least(),
            of_stages.iter().map(least_of).max().unwrap(),
            "{}",
            one.name
        );
        assert_eq!(needs.weights(), one.open.components.iter().map(|c| c.bytes).sum());
        for room in rooms(one.is_f32) {
            let (says, runs) = (model.fit(one.preset, &room), fit_on(&of_stages, &room));
            assert_eq!(
                says,
                runs,
                "{} in {} on {}",
                one.name,
                one.preset.as_str(),
                room.bytes
            );
        }
    }
}

/// Counted by hand from the shapes: what products and attention of a step compute, by which its time is predicted.
#[test]
fn a_step_computes_what_was_counted_by_hand() {
    let mut folders = Vec::new();
    let opened = opened(&mut folders);
    // 1024x1024, 4096 tokens of picture and 512 of text: 59.4 in products, 14.9 in attention. FramePack at its default size: 729
    // tokens of a picture, 256 of text, 14,400 that are sampled and those of the history: 255 and 289. Wan 2.2 5B at its default size,
    // a pass under one of two texts, 27,280 tokens: 237 in products and 279 in attention.
    for (name, tflop) in [
        ("flux-dev", 74.3),
        ("framepack", 544.0),
        ("wan2.2-ti2v-5b", 516.0),
    ] {
        for one in opened.iter().filter(|one| one.name == name) {
            let stages = one.open.model.plan(&one.default_request()).unwrap();
            let sampling = stages.iter().find(|stage| stage.role == Role::Sample).unwrap();
            let found = sampling.passes.flops.all as f64 / 1e12;
            let preset = one.preset.as_str();
            assert!(
                (found / tflop - 1.0).abs() < 0.05,
                "{name} in {preset}: {found} of {tflop}"
            );
        }
    }
}

/// A film that begins with no picture is shown in published colours while it is sampled.
#[test]
fn films_from_text_have_previews() {
    let library = Library::new(pipelines::families(), None);
    for name in ["hunyuan-video", "wan2.1-t2v-1.3b", "wan2.2-t2v-a14b"] {
        let root = TempDir::new().unwrap();
        write_model(name, root.path());
        let formats = Quantization::preset(Preset::ALL[0]);
        let entry = Entry::new(String::new(), String::new(), root.path().to_owned(), formats);
        let model = library.open(&entry, &card(false)).unwrap().model;
        let request = Request {
            preview: true,
            ..model.defaults()
        };
        for stage in model.plan(&request).unwrap() {
            let is_sampling = stage.role == Role::Sample;
            assert_eq!(stage.preview.is_some(), is_sampling, "{name}, {}", stage.name);
        }
    }
}

/// The file of sizes.
const SIZES: &str = "service/hub/src/catalogue/sizes.toml";
pub(super) const REFRESH: &str = "run `cargo test -p hub catalogue -- --ignored`";

const HEAD: &str = "\
# What the models of the catalogue need of a card, in bytes. Made by `cargo test -p hub catalogue -- --ignored`, not to be edited: checkpoints
# of the published shapes, without their numbers, are opened and planned. A test compares.
#
# components: bytes of all of each, and its blocks in the order of their use, which can be streamed; a block that is used once is not
# streamed again in each step. stages: those of the default request. passes: how often it goes over the blocks. scratch: working memory of each way
# to run it, the best first. requests: the default, then smaller ones, with the least that each needs of a card.
";

/// The text of the file.
fn text_of(all: &[Sizes]) -> String {
    let mut text = HEAD.to_owned();
    for sizes in all {
        write!(
            text,
            "\n[[sizes]]\nmodel = {:?}\npreset = {:?}\nis_f32 = {}\ncomponents = [\n",
            sizes.model, sizes.preset, sizes.is_f32
        )
        .unwrap();
        for component in &sizes.components {
            write!(
                text,
                "    {{ name = {:?}, bytes = {}",
                component.name, component.bytes
            )
            .unwrap();
            let blocks: Vec<String> = component.blocks.iter().map(line_of_blocks).collect();
            match blocks.is_empty() {
                true => text.push_str(" },\n"),
                false => writeln!(
                    text,
                    ", blocks = [\n        {},\n    ] }},",
                    blocks.join(",\n        ")
                )
                .unwrap(),
            }
        }
        text.push_str("]\nstages = [\n");
        for stage in &sizes.stages {
            writeln!(
                text,
                "    {{ name = {:?}, components = {:?}, passes = {}, scratch = {:?} }},",
                stage.name, stage.components, stage.passes, stage.scratch
            )
            .unwrap();
        }
        text.push_str("]\nrequests = [\n");
        for request in &sizes.requests {
            let extent = line_of_extent(request.extent);
            writeln!(
                text,
                "    {{ label = {:?}, extent = {{ {extent} }}, least = {} }},",
                request.label, request.least
            )
            .unwrap();
        }
        text.push_str("]\n");
    }
    text
}

fn line_of_extent(extent: Extent) -> String {
    let pixels = extent.pixels.map(|pixels| format!("pixels = {pixels}"));
    let frames = extent.frames.map(|frames| format!("frames = {frames}"));
    let seconds = extent.seconds.map(|seconds| format!("seconds = {seconds:?}"));
    let known: Vec<String> = [pixels, frames, seconds].into_iter().flatten().collect();
    known.join(", ")
}

fn line_of_blocks(blocks: &EqualBlocks) -> String {
    let EqualBlocks {
        count,
        bytes,
        in_ring,
        once,
    } = blocks;
    let once = if *once { ", once = true" } else { "" };
    format!("{{ count = {count}, bytes = {bytes}, in_ring = {in_ring}{once} }}")
}

/// Writes the sizes of the catalogue and, if they had been written before, the tables of the documents.
#[test]
#[ignore = "it writes files of the checkout"]
fn write_the_sizes_and_the_tables() {
    let mut folders = Vec::new();
    let sizes: Vec<Sizes> = opened(&mut folders).iter().map(Opened::sizes).collect();
    fs::write(checkout(SIZES), text_of(&sizes)).unwrap();
    assert!(
        sizes == all_sizes(),
        "the sizes are written: run this again, for the tables that are made of them"
    );
    tables::write(&checkout(""));
}
