//! An open Wan checkpoint: its answers to a planner, and the stages of a request.

use std::path::Path;
use std::sync::Arc;

use gpu::CheckpointFile;
use model::bounds::{common_problems, side_problems, start_problem};
use model::{Field, LeftOut, Reads, smaller_sides};

use super::authors;
use super::checkpoint::{FOLDERS, MARKS, PIPELINES, SECOND_FOLDER};
use super::config::TransformerConfig;
use super::layout::{NAMES, layout};
use crate::adapters::{AdapterFile, AdapterSet, TargetComponent};
use crate::autoencoders::wan::WanVaeConfig;
use crate::film_lengths;
use crate::sampling::Prompts;
use crate::stage::Stage;
use crate::text::t5::T5Config;
use crate::text::tokenizers::{T5Tokenizer, TokenizeError};
use crate::text::umt5;
use crate::unipc::UniPcConfig;
use crate::{
    Family, InitImage, Medium, Model, ModelError, ModelParts, Observer, OwnLayout, Precision, Request,
    RequestError, StageError, StagePlan, StageRun, ValueShape, Values,
};

/// Names of the components.
pub(super) const TRANSFORMER: &str = "transformer";
pub(super) const SECOND: &str = "transformer_2";
pub(super) const VAE: &str = "vae";
pub(super) const TEXT_ENCODER: &str = "text_encoder";

/// Name of the family.
pub(super) const FAMILY: &str = "wan";

/// The negative prompt that the authors recommend for all models.
pub(super) const NEGATIVE_PROMPT: &str = "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走";

/// The family of Wan 2.1 and 2.2.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wan;

impl Family for Wan {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn title(&self) -> Option<&'static str> {
        Some("Wan 2.1 and 2.2")
    }

    fn pipelines(&self) -> &'static [&'static str] {
        &PIPELINES
    }

    fn folders(&self, _class: &str) -> &'static [&'static str] {
        &FOLDERS
    }

    fn optional_folders(&self, _class: &str) -> &'static [&'static str] {
        &SECOND_FOLDER
    }

    fn own_layout(&self, files: &[&str]) -> Option<OwnLayout> {
        authors::own_layout(files)
    }

    fn has_own_layout(&self, folder: &Path) -> bool {
        authors::has_own_layout(folder)
    }

    fn is_transformer_file(&self, names: &[&str]) -> bool {
        MARKS.naming_of(names).is_some()
    }

    fn open(
        &self,
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        Ok(WanModel::of(path, file, precision)?.map(|model| Arc::new(model) as Arc<dyn Model>))
    }
}

/// What a film is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A text.
    Text,
    /// A text, and a picture if there is one, which stays the first latent frame (Wan 2.2 5B).
    TextOrPicture,
    /// A text and a picture, which conditions every cell (Wan 2.2 A14B).
    Picture,
}

impl Kind {
    pub(super) fn of(transformer: &TransformerConfig, expands_times: bool) -> Kind {
        match (transformer.is_conditioned(), expands_times) {
            (true, _) => Kind::Picture,
            (false, true) => Kind::TextOrPicture,
            (false, false) => Kind::Text,
        }
    }
}

/// A checkpoint of Wan.
#[derive(Clone, Debug)]
pub struct WanModel {
    pub(super) kind: Kind,
    /// The configuration of the transformer, or of both.
    pub(super) transformer: TransformerConfig,
    /// The part of the training steps from which on noise is high, if there is a transformer for each.
    pub(super) boundary: Option<f64>,
    pub(super) vae: WanVaeConfig,
    pub(super) text: T5Config,
    pub(super) scheduler: UniPcConfig,
    pub(super) tokenizer: Arc<T5Tokenizer>,
    pub(super) parts: ModelParts,
    /// The adapters that are attached to its components.
    pub(super) adapters: AdapterSet,
}

/// The optional fields of a request that a model of this kind reads.
pub(super) fn reads(kind: Kind) -> Reads {
    const PLAIN: Reads = Reads::of(&[
        Field::Adapters,
        Field::NegativePrompt,
        Field::TrueGuidance,
        Field::Fp8Attention,
        Field::Cards,
    ]);
    match kind {
        Kind::Text => PLAIN,
        Kind::TextOrPicture | Kind::Picture => PLAIN.and(&[Field::InitImage]),
    }
}

/// All fields of a request that are out of bounds. Sides are multiples of `grain`, and films have at most so many frames.
pub(super) fn problems(
    kind: Kind,
    has_two: bool,
    (grain, most): (u32, u32),
    request: &Request,
) -> Vec<RequestError> {
    let Medium::Video(video) = &request.medium else {
        return vec![RequestError::other_medium(&request.medium, "video")];
    };
    let mut problems = side_problems(video.width, video.height);
    for (field, side) in [("width", video.width), ("height", video.height)] {
        if side % grain != 0 && !problems.iter().any(|problem| problem.field == field) {
            let problem = format!("is {side}; a multiple of {grain} is expected");
            problems.push(RequestError::new(field, problem));
        }
    }
    problems.extend(common_problems(request));
    let mut refuse = |field: &str, problem: String| problems.push(RequestError::new(field, problem));
    let rate = video.frames_per_second;
    if !(1.0..=240.0).contains(&rate) {
        refuse("frames_per_second", format!("is {rate}; 1 to 240 is expected"));
    }
    if let Some(problem) = film_lengths::problem(video.frames, most) {
        refuse("frames", problem);
    } else if kind == Kind::TextOrPicture && video.init_image.is_some() && video.frames == 1 {
        let problem = "is 1; with a picture, which is the first frame, at least 5 are expected";
        refuse("frames", problem.to_owned());
    }
    if request.cards > 1 && request.negative().is_none() {
        let problem = format!(
            "is {}, where each card computes one of a step's two passes, and this film has one: leave it out, or set a negative \
             prompt and true_guidance over 1",
            request.cards
        );
        refuse("cards", problem);
    }
    let tokens = request.max_sequence_length;
    if tokens as usize > umt5::MOST_TOKENS {
        let problem = format!("is {tokens}; at most {} is expected", umt5::MOST_TOKENS);
        refuse("max_sequence_length", problem);
    }
    if request.guidance != 0.0 && !has_two {
        let problem = format!(
            "is {}; only models with two transformers read it, as the guidance of the one for low noise: set it to 0, and \
             true_guidance instead",
            request.guidance
        );
        refuse("guidance", problem);
    }
    match (&video.init_image, kind) {
        (Some(image), Kind::Picture | Kind::TextOrPicture) => {
            problems.extend(start_problem(image, (video.width, video.height)));
        }
        (None, Kind::Picture) => refuse(
            "init_image",
            "is missing: the model makes a film from a picture, which is its first frame".to_owned(),
        ),
        (_, Kind::Text) | (None, Kind::TextOrPicture) => {}
    }
    problems
}

impl WanModel {
    /// The model with these adapters in place of its present ones. Where there are two transformers, a file whose name says `high`
    /// or `low` changes that one, and another both.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be attached.
    pub fn adapted(&self, files: &[AdapterFile]) -> Result<WanModel, ModelError> {
        let specs = layout(&self.transformer);
        let target = |name: &'static str| TargetComponent::denoiser(name, &specs, NAMES, "");
        let mut targets = vec![target(TRANSFORMER)];
        if self.boundary.is_some() {
            targets.push(target(SECOND));
        }
        let of_file = |file: &AdapterFile| -> &[TargetComponent] {
            let name = file.path.file_name().unwrap_or_default().to_string_lossy();
            let name = format!("{} {name}", file.name).to_lowercase();
            match (targets.as_slice(), name.contains("high"), name.contains("low")) {
                ([high, _], true, false) => std::slice::from_ref(high),
                ([_, low], false, true) => std::slice::from_ref(low),
                (all, _, _) => all,
            }
        };
        let mut adapted = self.clone();
        adapted.adapters = AdapterSet::open_each(files, "Wan", &of_file, &mut adapted.parts)?;
        Ok(adapted)
    }

    /// Pixels of which the sides of a film are multiples: those of a token.
    pub(super) fn grain(&self) -> u32 {
        2 * self.vae.factor() as u32
    }

    fn problems(&self, request: &Request) -> Vec<RequestError> {
        let most = self.vae.frames(self.transformer.rope_max_seq_len) as u32;
        let mut problems = problems(self.kind, self.boundary.is_some(), (self.grain(), most), request);
        problems.extend(self.adapters.problems(&request.adapters));
        problems
    }

    /// The token ids of one of a request's texts.
    pub(super) fn ids(&self, request: &Request, text: &str) -> Result<Vec<u32>, TokenizeError> {
        let most = request.max_sequence_length as usize;
        let ids = self.tokenizer.encode_unpadded(&umt5::cleaned(text), most)?;
        self.tokenizer
            .check_known(&ids, TEXT_ENCODER, self.text.vocab_size)?;
        Ok(ids)
    }

    /// The number of tokens of each of a request's texts.
    pub(super) fn text_tokens(&self, request: &Request) -> Result<Prompts<usize>, RequestError> {
        Prompts::texts(request).try_map(|(field, text)| {
            let ids = self.ids(request, text);
            ids.map(|ids| ids.len())
                .map_err(|error| RequestError::new(field, error.to_string()))
        })
    }
}

impl Model for WanModel {
    fn parts(&self) -> &ModelParts {
        &self.parts
    }

    fn with_adapters(&self, files: &[AdapterFile]) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(self.adapted(files)?))
    }

    fn reads(&self) -> Reads {
        reads(self.kind)
    }

    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let problems = self.problems(request);
        if !problems.is_empty() {
            return Err(problems);
        }
        let refused = |problem| vec![problem];
        let video = request.video().map_err(refused)?;
        let tokens = self.text_tokens(request).map_err(refused)?;
        Ok(self.stages(request, video, &tokens))
    }

    fn with_required_pictures(&self, mut request: Request) -> Request {
        if let (Medium::Video(video), Kind::Picture) = (&mut request.medium, self.kind) {
            let size = (video.width, video.height);
            video.init_image.get_or_insert_with(|| InitImage::of_size(size));
        }
        request
    }

    fn request_of(&self, values: &[ValueShape]) -> Option<Request> {
        let video = self.video_of(values)?;
        Some(Request {
            medium: Medium::Video(video),
            ..self.defaults()
        })
    }

    fn size_near(&self, width: u32, height: u32) -> (u32, u32) {
        let grain = self.grain();
        let (width, height) = model::bounds::size_near(width, height);
        let side = |side: u32| (side / grain * grain).max(grain);
        (side(width), side(height))
    }

    fn frames_of(&self, seconds: f32, frames_per_second: f32) -> u32 {
        film_lengths::nearest_of_latents(seconds, frames_per_second)
    }

    fn left_out(&self, request: &Request) -> Vec<LeftOut> {
        let most = request.max_sequence_length as usize;
        Prompts::texts(request).left_out(request, |text| {
            self.tokenizer.left_out(&umt5::cleaned(text), most).ok()
        })
    }

    fn smaller(&self, request: &Request) -> Vec<(String, Request)> {
        [
            smaller_sides(request, self.grain()),
            film_lengths::shorter(request),
        ]
        .concat()
    }

    fn smallest(&self) -> Request {
        let mut request = self.defaults();
        (request.prompt, request.steps) = ("the smallest film".to_owned(), 1);
        if let Medium::Video(video) = &mut request.medium {
            let side = self.grain();
            (video.width, video.height, video.frames) = (side, side, 1);
        }
        self.with_required_pictures(request)
    }

    fn planned(&self, stage: &str, request: &Request) -> Vec<ops::Planned> {
        self.planned_of(stage, request)
    }

    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
        Stage::new(self, stage, observer).run()
    }
}
