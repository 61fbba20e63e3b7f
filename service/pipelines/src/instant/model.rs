//! The instant model: plans, and simulated computation.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gpu::{BlockPlace, ComponentTensors, LoadPlan, ScratchGuard, Synthetic, WeightFormat, simulated_scratch};
use model::Memo;
use model::ModelParts;
use model::bounds::{decode_from_problem, slots_problem};
use model::plan::only_value;
use model::{Audio, Image, Medium, Request, RequestError, Video};
use model::{Field, Reads};
use model::{
    Kept, Model, ModelError, Observer, Precision, StageError, StageRun, smaller_lengths, smaller_sides,
};
use model::{MediaFormat, Piece, SOUND_OF_FILM, SampleFormat, Sound};
use model::{Passes, PreviewNeed, Role, Rung, Section, StagePlan, ValueShape, Values};
use residency::{Bytes, Component, ComponentId};

use super::colour::{
    Colour, colour_of, encode, encoded_shapes, latent_of, loudness_of, mean_of_start, read_latent,
};
use super::content::{content_of, format_of, latent_shape, medium_of, sound_of, units_of};
use super::{
    DECODE, DECODE_SOUND, DENOISE, DescribedAdapter, DescribedComponent, Description, ENCODE_IMAGE,
    ENCODE_TEXT, FAMILY, LATENT, LEFT, SAMPLING,
};
use crate::adapters::{AdapterError, AdapterFile, AdapterKind, AdapterReport};
use crate::files::read_json;
use crate::rounds::{Round, check_shared, is_in_rounds, shared_pass};
use crate::start::is_from_latent;

/// Predicted bytes per second of a component's reload.
const LOAD_SPEED: f64 = 25e9;

/// Maximum sleep between two checks for cancellation.
const SLICE: Duration = Duration::from_millis(1);

/// Dimensions are multiples of this.
const GRAIN: u32 = 16;

/// The name of the fault in [`Model::smaller`].
const SMALLER: &str = "smaller";

/// Number of pieces of a long result.
const PIECES: u64 = 4;

/// Bytes of red that an adapter of strength 1 adds.
const RED_OF_ADAPTER: f32 = 40.0;

/// An opened instant model.
#[derive(Clone)]
pub(super) struct InstantModel {
    description: Description,
    parts: ModelParts,
    /// Formats of the components, made at load or stored.
    formats: Vec<Option<WeightFormat>>,
    /// Names of the adapters that are attached.
    adapters: Vec<String>,
}

/// Name of the latent of a section.
fn latent_of_section(number: u32) -> String {
    format!("{LATENT}_{number}")
}

/// Name of the component of an adapter.
fn component_of(adapter: &str) -> String {
    format!("adapter:{adapter}:transformer")
}

/// Bytes of a component in its format. Quantized at load, it takes a fraction of bf16: half for 8 bits; for nf4 half
/// a byte per element and 4 per block of 64; with double quantization 1 per block and 4 per 256 blocks.
fn bytes_in(described: &DescribedComponent, format: Option<WeightFormat>) -> Bytes {
    let (numerator, denominator) = match format {
        _ if described.stored.is_some() => (1, 1),
        Some(WeightFormat::Int8 | WeightFormat::Int8Scaled(..) | WeightFormat::Fp8(_)) => (1, 2),
        Some(WeightFormat::Nf4) => (9, 32),
        Some(WeightFormat::Nf4Double) => (2113, 8192),
        // Full precision, and what is not made at load.
        None | Some(_) => (1, 1),
    };
    Bytes((u128::from(described.bytes.0) * numerator / denominator) as u64)
}

/// The same medium, with every field at its default.
fn nothing_of(medium: &Medium) -> Medium {
    match medium {
        Medium::Image(_) => Medium::Image(Image::of(0, 0)),
        Medium::Video(_) => Medium::Video(Video::default()),
        Medium::Audio(_) => Medium::Audio(Audio::default()),
    }
}

fn push(parts: &mut ModelParts, id: String, name: String, (bytes, blocks): (Bytes, u32)) {
    let plan = LoadPlan::Synthetic(Synthetic { bytes, blocks });
    let component = Component {
        id: ComponentId::new(id),
        name,
        bytes,
        reload_seconds: bytes.0 as f64 / LOAD_SPEED,
        parts: plan.parts(),
    };
    parts.push(component, plan, Vec::new());
}

impl InstantModel {
    pub(super) fn new(description: Description, precision: &Precision) -> InstantModel {
        let mut parts = ModelParts::new(FAMILY, description.defaults(), &description.large(), precision);
        let mut formats = Vec::with_capacity(description.components.len());
        for c in &description.components {
            let made_at_load = parts.components.formats().of(&c.name);
            let format = c.stored.or(made_at_load);
            // A stored format is part of the described identity; a format made at load changes the identity.
            let id = match format.filter(|_| c.stored.is_none()) {
                Some(format) => format!("instant:{}:{format}", c.identity),
                None => format!("instant:{}", c.identity),
            };
            push(&mut parts, id, c.name.clone(), (bytes_in(c, format), c.blocks));
            formats.push(format);
        }
        InstantModel {
            description,
            parts,
            formats,
            adapters: Vec::new(),
        }
    }

    /// Adds the component of an adapter.
    fn attach(&mut self, file: &AdapterFile) -> Result<(), AdapterError> {
        if file.kind == AdapterKind::ControlNet {
            return Err(AdapterError::ControlNetNotTaken { family: FAMILY });
        }
        let described: DescribedAdapter =
            read_json(&file.path).map_err(|error| AdapterError::File(error.to_string()))?;
        let (id, name) = (
            format!("instant:{}", described.identity),
            component_of(&file.name),
        );
        push(&mut self.parts, id, name, (described.bytes, 0));
        self.formats.push(None);
        self.adapters.push(file.name.clone());
        Ok(())
    }

    /// The formats of its components without those of adapters.
    fn formats_of_checkpoint(&self) -> &[Option<WeightFormat>] {
        &self.formats[..self.description.components.len()]
    }

    /// The names, of these component names, that the model has.
    fn named(&self, names: &[&str]) -> Vec<String> {
        let own = self.components().iter().map(|c| &c.name);
        own.filter(|name| names.contains(&name.as_str()))
            .cloned()
            .collect()
    }

    /// Scales bytes for a result of the default size to this request's size.
    fn scaled(&self, bytes: Option<Bytes>, request: &Request) -> Bytes {
        Bytes(self.scaled_number(bytes.unwrap_or_default().0, request))
    }

    /// Scales what a result of the default size takes to this request's size.
    fn scaled_number(&self, number: u64, request: &Request) -> u64 {
        let usual = u128::from(units_of(&self.description.medium_of_defaults())).max(1);
        let units = u128::from(units_of(&request.medium));
        (u128::from(number) * units / usual) as u64
    }

    fn rungs(&self, stage: &str, request: &Request) -> Vec<Rung> {
        let whole = self.description.scratch.of(stage);
        let rung = |label: &str, part: u64| Rung::new(label, Bytes(self.scaled(whole, request).0 / part));
        match stage {
            // Text has one size for every result.
            ENCODE_TEXT => vec![Rung::whole(whole.unwrap_or_default())],
            DENOISE => {
                let whole = Rung::whole(self.scaled(whole, request));
                let adapters = request.adapters.iter().map(|each| component_of(&each.name));
                let adapters: Vec<String> = adapters.collect();
                let from_host = (!adapters.is_empty()).then(|| whole.with_from_host(adapters, Bytes::ZERO));
                std::iter::once(whole).chain(from_host).collect()
            }
            _ => vec![
                Rung::whole(self.scaled(whole, request)),
                rung("strips of 16", 2),
                Rung {
                    approximate: true,
                    ..rung("tiles of 64", 4)
                },
            ],
        }
    }

    /// Denoising steps that are run: all from noise, or the last ones from a starting point.
    fn steps_of(&self, request: &Request) -> u32 {
        let part = if is_from_latent(request) {
            request.strength.clamp(0.0, 1.0)
        } else {
            1.0
        };
        ((request.steps as f32 * part).round() as u32).clamp(1, request.steps.max(1))
    }

    /// The sections of a request's result; `None` where it is made in one.
    fn sections(&self, request: &Request) -> Option<u32> {
        let sections = self.description.sections?.get();
        match &request.medium {
            Medium::Video(video) => Some(sections.min(video.frames)),
            Medium::Image(_) | Medium::Audio(_) => None,
        }
    }

    /// The sound of a request's video, if the model makes any.
    fn sound(&self, request: &Request) -> Option<Sound> {
        match &request.medium {
            Medium::Video(video) if self.description.sound => Some(sound_of(video)),
            Medium::Image(_) | Medium::Video(_) | Medium::Audio(_) => None,
        }
    }

    /// The format of the result, with its sound.
    fn format(&self, request: &Request) -> MediaFormat {
        match &request.medium {
            Medium::Video(video) => video.format(self.sound(request)),
            medium @ (Medium::Image(_) | Medium::Audio(_)) => format_of(medium),
        }
    }

    /// The stages that sample and decode.
    fn stages_of_result(&self, request: &Request) -> Vec<StagePlan> {
        let mut stages = self.stages_of_frames(request);
        if self.sound(request).is_some() {
            // Of a film in sections the last one is there at the end.
            let sampled = self
                .sections(request)
                .map_or(LATENT.to_owned(), latent_of_section);
            stages.push(StagePlan {
                takes: vec![ValueShape::new(&sampled, latent_shape(&request.medium))],
                ..self.stage(DECODE_SOUND, request)
            });
        }
        stages
    }

    /// The stages that sample, and decode all but the sound of a film.
    fn stages_of_frames(&self, request: &Request) -> Vec<StagePlan> {
        let Some(of) = self.sections(request) else {
            let rounds = Round::all(request, self.steps_of(request));
            let mut stages: Vec<StagePlan> = rounds
                .iter()
                .map(|round| self.round_stage(round, request))
                .collect();
            stages.push(self.stage(DECODE, request));
            return stages;
        };
        let numbers = 1..=of;
        let of_section = |number: u32| {
            let section = Some(Section { number, of });
            let sampled = ValueShape::new(&latent_of_section(number), latent_shape(&request.medium));
            let left = || ValueShape::new(LEFT, latent_shape(&request.medium));
            let denoise = self.stage(DENOISE, request);
            let decode = self.stage(DECODE, request);
            [
                StagePlan {
                    gives: vec![sampled.name.clone()],
                    section,
                    ..denoise
                },
                StagePlan {
                    takes: std::iter::once(sampled).chain((number > 1).then(left)).collect(),
                    gives: (number < of).then(|| LEFT.to_owned()).into_iter().collect(),
                    section,
                    ..decode
                },
            ]
        };
        numbers.flat_map(of_section).collect()
    }

    /// A round of sampling; with one slot all of it.
    fn round_stage(&self, round: &Round, request: &Request) -> StagePlan {
        let whole = self.stage(DENOISE, request);
        if !is_in_rounds(request) {
            return whole;
        }
        let latent = || latent_shape(&request.medium);
        let of_text = encoded_shapes(request).into_iter();
        let state = round.begins_with(SAMPLING);
        let started = match &state {
            None => is_from_latent(request).then(|| ValueShape::new(LATENT, latent())),
            Some(name) => Some(ValueShape::new(name, latent())),
        };
        let size = content_of(&request.medium);
        let key = format!(
            "{} {size} {:?}",
            self.description.name,
            self.formats_of_checkpoint()
        );
        let each = whole.rungs.first().map_or(Bytes::ZERO, |rung| rung.scratch);
        StagePlan {
            steps: round.steps.end - round.steps.start,
            takes: of_text.chain(started).collect(),
            gives: vec![round.leaves(SAMPLING).unwrap_or_else(|| LATENT.to_owned())],
            shared: shared_pass(request, key, (each, Bytes::ZERO), BTreeMap::new()),
            // A preview of a shared pass would not show which of its requests it belongs to.
            preview: None,
            ..whole
        }
    }

    fn stage(&self, name: &'static str, request: &Request) -> StagePlan {
        let size = content_of(&request.medium);
        let tokens = request.max_sequence_length;
        let latent = || ValueShape::new(LATENT, latent_shape(&request.medium));
        let from_latent = is_from_latent(request);
        let (role, components, shape): (_, &[&str], _) = match name {
            ENCODE_TEXT => (
                Role::Encode,
                &["text_encoder", "text_encoder_2"],
                format!("t{tokens}"),
            ),
            ENCODE_IMAGE => (Role::Encode, &["vae"], size),
            DENOISE => (Role::Sample, &["transformer"], format!("{size} t{tokens}")),
            _ => (Role::Decode, &["vae"], size),
        };
        let (takes, gives) = match name {
            ENCODE_TEXT => (
                Vec::new(),
                encoded_shapes(request).map(|value| value.name).to_vec(),
            ),
            ENCODE_IMAGE => (Vec::new(), vec![LATENT.to_owned()]),
            DENOISE => {
                let from = from_latent.then(latent);
                let takes = encoded_shapes(request).into_iter().chain(from).collect();
                (takes, vec![LATENT.to_owned()])
            }
            _ => (vec![latent()], Vec::new()),
        };
        let is_text = name == ENCODE_TEXT;
        let adapters = request.adapters.iter().filter(|_| name == DENOISE);
        let adapters = adapters.map(|each| component_of(&each.name));
        let components = self.named(components).into_iter().chain(adapters);
        StagePlan {
            shape,
            steps: if name == DENOISE {
                self.steps_of(request)
            } else {
                1
            },
            takes,
            gives,
            per_item: !is_text,
            memo: is_text.then(|| Memo::of(request.of_prompt(nothing_of(&request.medium)))),
            passes: match name {
                DENOISE => Passes::of(self.scaled_number(self.description.step_flops, request)),
                _ => Passes::default(),
            },
            preview: (name == DENOISE && request.preview).then(|| PreviewNeed {
                components: self.named(&["vae"]),
                scratch: Bytes::ZERO,
            }),
            reads_media: match name {
                ENCODE_IMAGE => true,
                // The unmasked part is restored from the start picture.
                DECODE => matches!(&request.medium, Medium::Image(image) if image.mask.is_some()),
                _ => false,
            },
            ..StagePlan::of(name, role, components, self.rungs(name, request))
        }
    }

    /// The actual scratch of a rung: the file's own prediction unless it has `real_scratch`. (The plan's figure may
    /// have been learned.)
    fn real_scratch(&self, stage: &str, rung: usize, request: &Request) -> Bytes {
        let Some(real) = self.description.real_scratch.of(stage) else {
            let rungs = self.rungs(stage, request);
            return rungs.get(rung).map_or(Bytes::ZERO, |r| r.scratch);
        };
        let part = 1_u64 << rung.min(2);
        match stage {
            ENCODE_TEXT => real,
            _ => Bytes(self.scaled(Some(real), request).0 / part),
        }
    }

    /// The round of a stage, and the colour that it samples: found in the first, then taken from the one before.
    fn begun(&self, stage: &StageRun<'_>) -> Result<(Round, Colour), StageError> {
        let request = stage.request;
        let round = Round::of_plan(stage.plan, SAMPLING, self.steps_of(request))?;
        if let Some(state) = round.begins_with(SAMPLING) {
            return Ok((round, read_latent(stage.value(&state)?)?));
        }
        let names = encoded_shapes(request).map(|value| value.name);
        let values = names.iter().map(|name| Ok((name.as_str(), stage.value(name)?)));
        let text = values.collect::<Result<Vec<_>, StageError>>()?;
        let init = stage.value_if_taken(LATENT)?.map(read_latent).transpose()?;
        let mut colour = colour_of(&text, request, init);
        let strength: f32 = request.adapters.iter().map(|each| each.strength.first()).sum();
        colour[0] = colour[0].wrapping_add((strength * RED_OF_ADAPTER).round() as i32 as u8);
        Ok((round, colour))
    }

    /// The fault of this step, from 1, if the file asks for one.
    fn check_step(&self, step: u32) -> Result<(), StageError> {
        match self.description.not_finite_at_step == Some(step) {
            true => Err(StageError::NotFinite {
                component: "transformer".to_owned(),
                step,
            }),
            false => Ok(()),
        }
    }

    fn time_of_step(&self) -> Duration {
        Duration::from_millis(self.description.steps_ms)
    }

    fn denoise(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Colour, StageError> {
        let request = stage.request;
        let (round, colour) = self.begun(stage)?;
        let has_previews = request.preview && stage.plan.shared.is_none();
        check_part(stage, observer)?;
        for step in round.steps.clone().map(|step| step + 1) {
            self.pass(stage)?;
            sleep(self.time_of_step(), observer)?;
            self.check_step(step)?;
            observer.step(step, round.of);
            if has_previews
                && observer.wants_preview()
                && let Some((width, height)) = request.medium.size()
            {
                let (width, height) = (width / 8, height / 8);
                observer.preview(width, height, colour.repeat((width * height) as usize));
            }
        }
        Ok(colour)
    }

    /// Rounds of several requests, a step of each in the time of one, until each is done.
    fn denoise_shared(
        &self,
        stages: &[StageRun<'_>],
        observer: &mut dyn Observer,
    ) -> Vec<Result<Colour, StageError>> {
        let mut begun: Vec<Result<(Round, Colour), StageError>> =
            stages.iter().map(|stage| self.begun(stage)).collect();
        loop {
            let runs = |found: &Result<(Round, Colour), StageError>| matches!(found, Ok((round, _)) if !round.steps.is_empty());
            let running: Vec<usize> = (0..begun.len()).filter(|&slot| runs(&begun[slot])).collect();
            if running.is_empty() {
                break;
            }
            let all_cancelled = || running.iter().all(|&slot| observer.is_cancelled(slot));
            // That all were cancelled is seen of each below.
            let _awake = sleep_until(self.time_of_step(), &all_cancelled);
            for slot in running {
                let Ok((round, _)) = &mut begun[slot] else {
                    continue;
                };
                let (step, of) = (round.steps.start + 1, round.of);
                round.steps.start = step;
                if observer.is_cancelled(slot) {
                    begun[slot] = Err(StageError::Cancelled);
                } else if let Err(fault) = self.check_step(step) {
                    begun[slot] = Err(fault);
                } else {
                    observer.step_of(slot, step, of);
                }
            }
        }
        let colours = begun.into_iter();
        colours.map(|found| found.map(|(_, colour)| colour)).collect()
    }

    /// A pass over all blocks of the stage's components.
    fn pass(&self, stage: &StageRun<'_>) -> Result<(), StageError> {
        for described in &self.description.components {
            if described.blocks > 0 && stage.plan.components.contains(&described.name) {
                let stream = (stage.tensors)(&described.name)?.stream();
                for number in 0..described.blocks as usize {
                    stream.enter(BlockPlace::each_pass(number))?;
                }
            }
        }
        Ok(())
    }

    /// Delivers the result in a few pieces, each of which takes the time of a step if pieces are slow.
    fn decode(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
        let format = self.format(stage.request);
        let latent = match stage.plan.section {
            None => stage.value(LATENT)?,
            Some(section) => stage.value(&latent_of_section(section.number))?,
        };
        let colour = read_latent(latent)?;
        if let Some(left) = stage.value_if_taken(LEFT)?
            && read_latent(left)? != colour
        {
            return Err(StageError::BadInput(
                "what the section before left is not of this film".to_owned(),
            ));
        }
        let left = latent.clone();
        let units = match stage.plan.section {
            None => 0..format.units(),
            Some(Section { number, of }) => {
                let share = |sections: u32| format.units() * u64::from(sections) / u64::from(of);
                share(of - number)..share(of - number + 1)
            }
        };
        let at_once = (units.end - units.start).div_ceil(PIECES).max(1);
        let at_once = match stage.request.medium {
            Medium::Video(ref video) if video.frames_at_a_time > 0 => {
                at_once.min(video.frames_at_a_time.into())
            }
            _ => at_once,
        };
        let mut firsts: Vec<u64> = units.clone().step_by(at_once as usize).collect();
        if let (
            Medium::Audio(audio),
            MediaFormat::Audio {
                samples_per_second, ..
            },
        ) = (&stage.request.medium, format)
        {
            let from = (f64::from(audio.decode_from_seconds) * f64::from(samples_per_second)) as u64;
            // Beyond the end there is no such piece, and the order is the usual one.
            let piece = firsts
                .iter()
                .position(|&first| (first..first + at_once).contains(&from));
            firsts.rotate_left(piece.unwrap_or(0));
        }
        let pieces = firsts
            .into_iter()
            .map(|first| first..(first + at_once).min(units.end));
        self.deliver(stage, (format, ""), colour, pieces, observer)?;
        let gives_left = stage.plan.gives.iter().any(|name| name == LEFT);
        Ok(gives_left.then(|| (LEFT.to_owned(), left)).into_iter().collect())
    }

    /// Delivers the sound of a film in a few pieces.
    fn decode_sound(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
        let missing = || StageError::BadInput("the film has no sound".to_owned());
        let sound = self.sound(stage.request).ok_or_else(missing)?;
        let taken = stage.plan.takes.first().ok_or_else(missing)?;
        let colour = read_latent(stage.value(&taken.name)?)?;
        let at_once = sound.samples.div_ceil(PIECES).max(1);
        let firsts = (0..sound.samples).step_by(at_once as usize);
        let pieces = firsts.map(|first| first..(first + at_once).min(sound.samples));
        self.deliver(stage, (sound.track(), SOUND_OF_FILM), colour, pieces, observer)?;
        Ok(Values::new())
    }

    /// Delivers these pieces of a track of one colour, each in the time of a step.
    fn deliver(
        &self,
        stage: &StageRun<'_>,
        (format, track): (MediaFormat, &str),
        colour: Colour,
        pieces: impl Iterator<Item = Range<u64>>,
        observer: &mut dyn Observer,
    ) -> Result<(), StageError> {
        let unit_bytes = format.unit_bytes() as usize;
        for (
            number,
            Range {
                start: first,
                end: last,
            },
        ) in pieces.enumerate()
        {
            if number > 0 {
                sleep(self.time_of_step(), observer)?;
            }
            let mut data = Vec::with_capacity((last - first) as usize * unit_bytes);
            for unit in first..last {
                match format {
                    MediaFormat::Audio { channels, .. } => {
                        let of_channel = |c: u32| loudness_of(colour[c as usize % 3]);
                        data.extend((0..channels).flat_map(|c| of_channel(c).to_le_bytes()));
                    }
                    MediaFormat::Image { .. } | MediaFormat::Video { .. } => {
                        // Each frame is slightly redder than the previous one.
                        let [red, green, blue] = colour;
                        let frame = [red.wrapping_add(unit as u8), green, blue];
                        data.extend(frame.repeat(unit_bytes / 3));
                    }
                }
            }
            if let Medium::Image(image) = &stage.request.medium {
                image.keep_unmasked(&mut data);
            }
            observer.deliver(Piece {
                track: track.to_owned(),
                format,
                first,
                data: data.into(),
            });
        }
        Ok(())
    }

    /// A fault for tests.
    fn panic_if_asked(&self, here: &str) {
        let asked = self.description.panic_at.as_deref();
        assert_ne!(asked, Some(here), "the model's file asks for this panic");
    }

    /// All fields of a request that are out of bounds.
    fn problems(&self, request: &Request) -> Vec<RequestError> {
        let made = self.description.medium.name();
        if request.medium.name() != made {
            return vec![RequestError::other_medium(&request.medium, made)];
        }
        let mut wrong = Vec::new();
        let unknown = request
            .adapters
            .iter()
            .find(|each| !self.adapters.contains(&each.name));
        if let Some(unknown) = unknown {
            let problem = format!("{} is not attached to the model", unknown.name);
            wrong.push(RequestError::new("adapters", problem));
        }
        let mut require = |holds: bool, field: &str, problem: &str| {
            if !holds {
                wrong.push(RequestError::new(field, problem));
            }
        };
        if let Some((width, height)) = request.medium.size() {
            let size_is_right =
                |pixels: u32| (GRAIN..=8192).contains(&pixels) && pixels.is_multiple_of(GRAIN);
            let size = "must be a multiple of 16 between 16 and 8192";
            require(size_is_right(width), "width", size);
            require(size_is_right(height), "height", size);
        }
        match &request.medium {
            Medium::Image(_) => {}
            Medium::Video(video) => {
                let frames = (1..=1000).contains(&video.frames);
                require(frames, "frames", "must be between 1 and 1000");
                let rate = (1.0..=240.0).contains(&video.frames_per_second);
                require(rate, "frames_per_second", "must be between 1 and 240");
            }
            Medium::Audio(audio) => {
                let seconds = (0.1..=600.0).contains(&audio.seconds);
                require(seconds, "seconds", "must be between 0.1 and 600");
            }
        }
        require(
            (1..=200).contains(&request.steps),
            "steps",
            "must be between 1 and 200",
        );
        require(
            request.guidance.is_finite() && request.guidance >= 0.0,
            "guidance",
            "must not be negative",
        );
        let tokens = (1..=512).contains(&request.max_sequence_length);
        require(tokens, "max_sequence_length", "must be between 1 and 512");
        if is_from_latent(request) {
            let strength = request.strength > 0.0 && request.strength <= 1.0;
            require(strength, "strength", "must be over 0 and at most 1");
        }
        if let (Some(image), Some(size)) = (request.medium.init_image(), request.medium.size()) {
            let same_size = (image.width, image.height) == size;
            require(
                same_size && image.is_whole(),
                "init_image",
                "must have the size of the picture",
            );
        }
        if let (Medium::Image(image), Some(size)) = (&request.medium, request.medium.size())
            && let Some(mask) = &image.mask
        {
            let has_start = image.init_image.is_some() || request.from_values;
            require(
                (mask.width, mask.height) == size && mask.is_whole() && has_start,
                "mask",
                "must have the size of the picture, and a picture to change (init_image)",
            );
        }
        if let Some(clip) = request.medium.init_clip() {
            let is_such = matches!(
                (&request.medium, clip.format),
                (Medium::Video(_), MediaFormat::Video { .. }) | (Medium::Audio(_), MediaFormat::Audio { .. })
            );
            let has_units = clip.format.bytes().is_some_and(|bytes| bytes > 0);
            require(
                is_such && has_units && clip.is_whole(),
                "init_media_id",
                "must be whole, and of the medium that is generated",
            );
        }
        wrong.extend(slots_problem(request));
        if let Medium::Audio(audio) = &request.medium {
            wrong.extend(decode_from_problem(audio));
        }
        wrong
    }
}

/// Checks that as many cards run a stage as its request asks for: each tells the other its part.
fn check_part(stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<(), StageError> {
    let alone = || StageError::BadInput("it was planned for two cards and runs on one".to_owned());
    if stage.request.cards == 1 && stage.part.is_none() {
        return Ok(());
    }
    let part = stage.part.ok_or_else(alone)?;
    let of = |part: u32| format!("part {part} with seed {}", stage.request.seed);
    let other = observer.meet(of(part).as_bytes())?;
    match other == of(1 - part.min(1)).into_bytes() {
        true => Ok(()),
        false => Err(StageError::BadInput(format!(
            "part {part} met {:?}",
            String::from_utf8_lossy(&other)
        ))),
    }
}

/// Allocates activations on the simulated card that runs the stage; none on a real card.
fn take_scratch(bytes: Bytes, stage: &str) -> Result<Option<ScratchGuard>, StageError> {
    simulated_scratch(bytes).map_err(|_| StageError::OutOfMemory {
        stage: stage.to_owned(),
    })
}

/// The components of a stage, kept until its end, as a real family's tensors are.
fn resident(stage: &StageRun<'_>) -> Result<Vec<Arc<ComponentTensors>>, StageError> {
    let names = stage.plan.components.iter();
    names.map(|name| (stage.tensors)(name)).collect()
}

/// The values of a stage that sampled this colour.
fn sampled(stage: &StageRun<'_>, colour: Colour) -> Values {
    let sampled = latent_of(colour, latent_shape(&stage.request.medium));
    let names = stage.plan.gives.iter().cloned();
    names.map(|name| (name, sampled.clone())).collect()
}

/// Sleeps in slices, and returns early when cancelled.
fn sleep(pretended: Duration, observer: &dyn Observer) -> Result<(), StageError> {
    sleep_until(pretended, &|| observer.cancelled())
}

fn sleep_until(pretended: Duration, cancelled: &dyn Fn() -> bool) -> Result<(), StageError> {
    let until = std::time::Instant::now() + pretended;
    loop {
        if cancelled() {
            return Err(StageError::Cancelled);
        }
        let left = until.saturating_duration_since(std::time::Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(SLICE));
    }
}

impl Model for InstantModel {
    fn parts(&self) -> &ModelParts {
        &self.parts
    }

    fn track_format(&self) -> Option<SampleFormat> {
        match format_of(&self.description.medium_of_defaults()) {
            MediaFormat::Audio {
                samples_per_second,
                channels,
                ..
            } => Some(SampleFormat {
                samples_per_second,
                channels,
            }),
            MediaFormat::Image { .. } | MediaFormat::Video { .. } => None,
        }
    }

    fn format_of(&self, component_name: &str) -> Option<WeightFormat> {
        let index = self.components().iter().position(|c| c.name == component_name)?;
        *self.formats.get(index)?
    }

    fn with_adapters(&self, files: &[AdapterFile]) -> Result<Arc<dyn Model>, ModelError> {
        let mut adapted = self.clone();
        for file in files {
            adapted.attach(file).map_err(|error| ModelError::Adapter {
                name: file.name.clone(),
                error,
            })?;
        }
        Ok(Arc::new(adapted))
    }

    fn adapters(&self) -> Vec<AdapterReport> {
        let report = |name: &String| AdapterReport {
            name: name.clone(),
            layers: [("transformer".to_owned(), 1)].into(),
            ..AdapterReport::default()
        };
        self.adapters.iter().map(report).collect()
    }

    /// All fields that the family can pretend to read.
    fn reads(&self) -> Reads {
        Reads::of(&[
            Field::InitImage,
            Field::InitMedia,
            Field::InitLatent,
            Field::Mask,
            Field::Adapters,
            Field::ReferenceMedia,
            Field::Task,
            Field::Lyrics,
            Field::BeatsPerMinute,
            Field::Key,
            Field::TimeSignature,
            Field::Language,
            Field::Strengths,
            Field::DecodeFrom,
            Field::Cards,
        ])
    }

    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let problems = self.problems(request);
        if !problems.is_empty() {
            return Err(problems);
        }
        let encodes_start = request.medium.has_start() && !request.from_values;
        let names = [ENCODE_TEXT, ENCODE_IMAGE].into_iter();
        let names = names.filter(|name| *name != ENCODE_IMAGE || encodes_start);
        let encodes = names.map(|name| self.stage(name, request));
        Ok(encodes.chain(self.stages_of_result(request)).collect())
    }

    fn request_of(&self, values: &[ValueShape]) -> Option<Request> {
        let shape = match self.description.sections {
            None => only_value(values, LATENT)?,
            // All have the shape of the whole.
            Some(_) => &values.first()?.shape,
        };
        let mut request = self.defaults();
        request.medium = medium_of(shape, &request.medium)?;
        Some(request)
    }

    fn smaller(&self, request: &Request) -> Vec<(String, Request)> {
        self.panic_if_asked(SMALLER);
        [smaller_sides(request, GRAIN), smaller_lengths(request)].concat()
    }

    fn smallest(&self) -> Request {
        let mut request = self.defaults();
        (request.prompt, request.steps) = ("the smallest request".to_owned(), 1);
        match &mut request.medium {
            Medium::Image(image) => (image.width, image.height) = (GRAIN, GRAIN),
            Medium::Video(video) => (video.width, video.height, video.frames) = (GRAIN, GRAIN, 1),
            Medium::Audio(audio) => audio.seconds = 0.1,
        }
        request
    }

    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
        let (plan, request) = (stage.plan, stage.request);
        let _resident = resident(stage)?;
        let _scratch = take_scratch(self.real_scratch(&plan.name, stage.rung, request), &plan.name)?;
        if observer.cancelled() {
            return Err(StageError::Cancelled);
        }
        self.panic_if_asked(&plan.name);
        let latent = |colour| {
            let latent = latent_of(colour, latent_shape(&request.medium));
            Values::from([(LATENT.to_owned(), latent)])
        };
        match plan.name.as_str() {
            ENCODE_TEXT => {
                self.pass(stage)?;
                Ok(encode(request))
            }
            ENCODE_IMAGE => {
                let mean = mean_of_start(&request.medium);
                let mean =
                    mean.ok_or_else(|| StageError::BadInput("there is nothing to encode".to_owned()))?;
                Ok(latent(mean))
            }
            DENOISE => Ok(sampled(stage, self.denoise(stage, observer)?)),
            DECODE => self.decode(stage, observer),
            DECODE_SOUND => self.decode_sound(stage, observer),
            other => Err(StageError::BadInput(format!("there is no stage {other}"))),
        }
    }
    fn run_shared(
        &self,
        stages: &[StageRun<'_>],
        kept: &mut Kept,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Values, StageError>>, StageError> {
        check_shared(stages)?;
        let resident = stages.iter().map(resident).collect::<Result<Vec<_>, _>>()?;
        let scratch = stages
            .iter()
            .map(|stage| self.real_scratch(DENOISE, 0, stage.request));
        let _scratch = take_scratch(scratch.sum(), DENOISE)?;
        self.panic_if_asked(DENOISE);
        let colours = self.denoise_shared(stages, observer).into_iter();
        let values = colours
            .zip(stages)
            .map(|(colour, stage)| Ok(sampled(stage, colour?)));
        let values = values.collect();
        // Handles of components, as a real family keeps.
        for stage in stages {
            let round = Round::of_plan(stage.plan, SAMPLING, self.steps_of(stage.request))?;
            if !round.is_last() {
                kept.put(resident);
                break;
            }
        }
        Ok(values)
    }
}
