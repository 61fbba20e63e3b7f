//! An open HunyuanVideo or FramePack checkpoint: its answers to a planner, and the stages of a request.

use gpu::CheckpointFile;
use model::bounds::{PIXELS_PER_TOKEN, common_problems, side_problems, start_problem};
use model::{Field, LeftOut, Reads, smaller_sides};
use std::path::Path;
use std::sync::Arc;

use super::checkpoint::{MARKS, PARTS, PIPELINES, folders_of};
use super::config::TransformerConfig;
use super::layout::{NAMES, layout};
use super::places::TRANSFORMERS;
use super::plan::{DENOISE, ENCODE_END, ENCODE_IMAGE, ENCODE_TEXT, ENCODE_VISION, longest};
use super::sections::{Order, Sections};
use super::transformer::TokenCounts;
use crate::adapters::{AdapterFile, AdapterSet, TargetComponent};
use crate::attention::AttentionPrecision;
use crate::autoencoders::hunyuan::{Chunking, HunyuanVaeConfig};
use crate::film_lengths;
use crate::flow_match::SchedulerConfig;
use crate::sampling::Prompts;
use crate::stage::Stage;
use crate::text::clip::ClipConfig;
use crate::text::llama::LlamaConfig;
use crate::text::tokenizers::{ClipTokenizer, LlamaTokenizer};
use crate::vision::processor::ImageProcessor;
use crate::vision::siglip::SiglipConfig;
use crate::{
    Family, InitImage, Medium, Model, ModelError, ModelParts, Observer, Precision, Request, RequestError,
    StageError, StagePlan, StageRun, ValueShape, Values, Video,
};

/// Names of the components.
pub(super) const TRANSFORMER: &str = "transformer";
pub(super) const VAE: &str = "vae";
pub(super) const LLAMA: &str = "text_encoder";
pub(super) const CLIP: &str = "text_encoder_2";
pub(super) const VISION: &str = "image_encoder";

/// Latent frames of a section, as FramePack was trained with.
const WINDOW: usize = 9;

/// Most frames of a film: ten minutes.
const MAX_FRAMES: u32 = 18_000;

/// Name of the family.
pub(super) const FAMILY: &str = "hunyuan-video";

/// The family of HunyuanVideo and FramePack.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hunyuan;

impl Family for Hunyuan {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn title(&self) -> Option<&'static str> {
        Some("HunyuanVideo and FramePack")
    }

    fn pipelines(&self) -> &'static [&'static str] {
        &PIPELINES
    }

    fn folders(&self, class: &str) -> &'static [&'static str] {
        folders_of(class)
    }

    fn parts(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &PARTS
    }

    fn transformers(&self) -> &'static [&'static str] {
        &TRANSFORMERS
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
        Ok(HunyuanModel::of(path, file, precision)?.map(|model| Arc::new(model) as Arc<dyn Model>))
    }
}

/// The parts that FramePack has in addition to HunyuanVideo's.
#[derive(Clone, Debug)]
pub(super) struct FramePack {
    pub(super) order: Order,
    pub(super) vision: SiglipConfig,
    pub(super) processor: ImageProcessor,
}

/// A checkpoint of HunyuanVideo or FramePack.
#[derive(Clone, Debug)]
pub struct HunyuanModel {
    pub(super) transformer: TransformerConfig,
    pub(super) vae: HunyuanVaeConfig,
    pub(super) llama: LlamaConfig,
    pub(super) clip: ClipConfig,
    /// `None`: HunyuanVideo, text to film.
    pub(super) framepack: Option<FramePack>,
    pub(super) scheduler: SchedulerConfig,
    pub(super) llama_tokenizer: Arc<LlamaTokenizer>,
    pub(super) clip_tokenizer: Arc<ClipTokenizer>,
    pub(super) parts: ModelParts,
    /// The adapters that are attached to its components.
    pub(super) adapters: AdapterSet,
}

/// The optional fields of a request that every model of the family reads.
const READS: Reads = Reads::of(&[
    Field::Adapters,
    Field::NegativePrompt,
    Field::TrueGuidance,
    Field::StepCache,
    Field::Fp8Attention,
    Field::Cards,
]);

/// The optional fields of a request that the model reads. An end picture has no part in films that are sampled from their start.
pub(super) fn reads(framepack: Option<Order>) -> Reads {
    match framepack {
        Some(Order::Backward) => READS.and(&[Field::InitImage, Field::EndImage]),
        Some(Order::Forward) => READS.and(&[Field::InitImage]),
        None => READS,
    }
}

/// All fields of a request that are out of bounds.
pub(super) fn problems(framepack: Option<Order>, request: &Request) -> Vec<RequestError> {
    let Medium::Video(video) = &request.medium else {
        return vec![RequestError::other_medium(&request.medium, "video")];
    };
    let mut problems = side_problems(video.width, video.height);
    problems.extend(common_problems(request));
    let mut refuse = |field: &str, problem: String| problems.push(RequestError::new(field, problem));
    let rate = video.frames_per_second;
    if !(1.0..=240.0).contains(&rate) {
        refuse("frames_per_second", format!("is {rate}; 1 to 240 is expected"));
    }
    if request.cards > 1 && request.step_cache > 0.0 {
        // Both cards would have to leave out the same passes.
        let problem = "is not taken with step_cache: leave one of them out";
        refuse("cards", problem.to_owned());
    }
    if let Err(problem) = check_frames(framepack, video.frames) {
        refuse("frames", problem);
    }
    match (&video.init_image, framepack) {
        (Some(image), Some(_)) => problems.extend(start_problem(image, (video.width, video.height))),
        (None, Some(_)) => refuse(
            "init_image",
            "is missing: FramePack makes a film from a picture, which is its first frame".to_owned(),
        ),
        (_, None) => {}
    }
    if let Some(image) = &video.end_image {
        let size = (video.width, video.height);
        problems.extend(model::bounds::picture_problem("end_image", image, size));
    }
    problems
}

/// Refuses a number of frames for which the model has no length.
fn check_frames(framepack: Option<Order>, frames: u32) -> Result<(), String> {
    let Some(order) = framepack.filter(|_| frames <= MAX_FRAMES) else {
        return film_lengths::problem(frames, MAX_FRAMES).map_or(Ok(()), Err);
    };
    if Sections::of_film(order, WINDOW, frames as usize).is_some() {
        return Ok(());
    }
    let above = Sections::at_least(order, WINDOW, frames as usize);
    let below = Sections {
        count: above.count.saturating_sub(1).max(1),
        ..above
    };
    let examples = film_lengths::examples(below.frames(), above.frames());
    Err(format!(
        "is {frames}; FramePack makes a multiple of 36 plus 1, such as {examples}"
    ))
}

impl HunyuanModel {
    /// The model with these adapters in place of its present ones.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be attached.
    pub fn adapted(&self, files: &[AdapterFile]) -> Result<HunyuanModel, ModelError> {
        let targets = [TargetComponent::denoiser(
            TRANSFORMER,
            &layout(&self.transformer),
            NAMES,
            "",
        )];
        let mut adapted = self.clone();
        adapted.adapters = AdapterSet::open(files, "HunyuanVideo", &targets, &mut adapted.parts)?;
        Ok(adapted)
    }

    pub(super) fn order(&self) -> Option<Order> {
        self.framepack.as_ref().map(|framepack| framepack.order)
    }

    /// The sections of a film; `None` where it is made in one piece.
    pub(super) fn sections(&self, video: &Video) -> Option<Sections> {
        let sections = Sections::of_film(self.order()?, WINDOW, video.frames as usize)?;
        Some(Sections {
            has_end: video.end_image.is_some(),
            ..sections
        })
    }

    /// Height and width of a film's latents.
    pub(super) fn sides(&self, video: &Video) -> (usize, usize) {
        self.vae.latent_sides(video.width, video.height)
    }

    /// Requests for the same film with fewer frames.
    fn smaller_lengths(&self, request: &Request) -> Vec<(String, Request)> {
        match self.order() {
            Some(_) => Vec::new(), // a section takes as much memory in a film of any length
            None => film_lengths::shorter(request),
        }
    }
}

impl Model for HunyuanModel {
    fn parts(&self) -> &ModelParts {
        &self.parts
    }

    fn with_adapters(&self, files: &[AdapterFile]) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(self.adapted(files)?))
    }

    fn reads(&self) -> Reads {
        reads(self.order())
    }

    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let mut problems = problems(self.order(), request);
        problems.extend(self.adapters.problems(&request.adapters));
        if !problems.is_empty() {
            return Err(problems);
        }
        let video = request.video().map_err(|problem| vec![problem])?;
        self.stages(request, video)
            .map_err(|error| vec![RequestError::new("prompt", error.to_string())])
    }

    fn with_required_pictures(&self, mut request: Request) -> Request {
        if let (Medium::Video(video), Some(_)) = (&mut request.medium, self.order()) {
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

    fn frames_of(&self, seconds: f32, frames_per_second: f32) -> u32 {
        match self.order() {
            Some(order) => {
                let step = Sections::at_least(order, WINDOW, 1).frames() as u32 - 1;
                film_lengths::nearest(seconds, frames_per_second, (step, 1))
            }
            None => film_lengths::nearest_of_latents(seconds, frames_per_second),
        }
    }

    fn left_out(&self, request: &Request) -> Vec<LeftOut> {
        let most = request.max_sequence_length as usize;
        Prompts::texts(request).left_out(request, |text| self.llama_tokenizer.left_out(text, most).ok())
    }

    fn smaller(&self, request: &Request) -> Vec<(String, Request)> {
        [
            smaller_sides(request, PIXELS_PER_TOKEN),
            self.smaller_lengths(request),
        ]
        .concat()
    }

    fn smallest(&self) -> Request {
        let mut request = self.defaults();
        (request.prompt, request.steps) = ("the smallest film".to_owned(), 1);
        if let Medium::Video(video) = &mut request.medium {
            let side = 2 * PIXELS_PER_TOKEN;
            (video.width, video.height) = (side, side);
            video.frames = match self.order() {
                Some(order) => Sections::at_least(order, WINDOW, 1).frames() as u32,
                None => 1,
            };
            video.init_image = self.order().map(|_| black(side, side));
        }
        request
    }

    fn planned(&self, stage: &str, request: &Request) -> Vec<ops::Planned> {
        let Ok(video) = request.video() else {
            return Vec::new();
        };
        let (sides, dtype) = (self.sides(video), self.parts.dtype());
        if sides.0 * sides.1 == 0 {
            return Vec::new();
        }
        match stage {
            ENCODE_TEXT => {
                let Ok(prompts) = self.prompt_ids(request) else {
                    return Vec::new();
                };
                let of_llama = prompts
                    .iter()
                    .map(|prompt| self.llama.planned(prompt.ids.len(), dtype));
                let of_clip = self.clip.planned(self.clip_tokenizer.length(), dtype);
                of_llama.chain([of_clip]).collect()
            }
            ENCODE_IMAGE | ENCODE_END => self.vae.planned_to_encode(sides, 1, Chunking::Whole, dtype),
            ENCODE_VISION => Vec::new(),
            DENOISE => {
                let Ok(prompts) = self.prompt_ids(request) else {
                    return Vec::new();
                };
                let attention = AttentionPrecision::asked(request);
                let of_prompts = prompts.map(|prompt| self.tokens_of_cards(prompt.used(), request, video));
                let mut planned = Vec::new();
                for card in 0..of_prompts.prompt.len() {
                    for shape in self.planned_to_denoise(&of_prompts.map(|tokens| tokens[card]), attention) {
                        if !planned.contains(&shape) {
                            planned.push(shape);
                        }
                    }
                }
                planned
            }
            _ => self
                .vae
                .planned_to_decode(sides, self.decoded_at_once(video), Chunking::Whole, dtype),
        }
    }

    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
        Stage::new(self, stage, observer).run()
    }
}

impl HunyuanModel {
    /// Shapes of attention in a step: of each prompt the text, refined alone, and then all tokens, in the buffers of the longest
    /// text. The negative prompt comes first.
    fn planned_to_denoise(
        &self,
        of_prompts: &Prompts<TokenCounts>,
        attention: AttentionPrecision,
    ) -> Vec<ops::Planned> {
        let (blocks, dtype) = (self.transformer.blocks(), self.parts.dtype());
        let rows = longest(of_prompts).all();
        let passes = of_prompts.negative.iter().chain([&of_prompts.prompt]);
        let mut planned = Vec::new();
        for tokens in passes {
            let (rows, others) = ((rows, tokens.others), tokens.others);
            let refined = match self.transformer.num_refiner_layers {
                0 => Vec::new(),
                _ => {
                    let in_full = (dtype, AttentionPrecision::Full);
                    blocks.planned_in(rows, (tokens.text, tokens.text, 0), in_full)
                }
            };
            let of_text = (tokens.all(), tokens.sampled, others);
            let all = blocks.planned_in(rows, of_text, (dtype, attention));
            for shape in refined.into_iter().chain(all) {
                if !planned.contains(&shape) {
                    planned.push(shape);
                }
            }
        }
        planned
    }
}

/// A black picture.
pub(super) fn black(width: u32, height: u32) -> InitImage {
    InitImage {
        width,
        height,
        rgb: vec![0; 3 * width as usize * height as usize].into(),
    }
}
