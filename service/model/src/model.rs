//! The interface of a model to the code that runs it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use gpu::{LoadPlan, Target, TensorSource, WeightFormat};
use residency::{Bytes, Component};

use crate::adapter::{AdapterError, AdapterFile, AdapterReport};
use crate::bounds::{self, too_many_references};
use crate::errors::{ModelError, StageError};
use crate::identity::ModelFile;
use crate::kept::Kept;
use crate::left_out::LeftOut;
use crate::media::SampleFormat;
use crate::parts::ModelParts;
use crate::plan::{Role, StagePlan, ValueShape, Values};
use crate::precision::Precision;
use crate::quantization::{Formats, Quantization};
use crate::reads::{Field, Reads};
use crate::request::{Medium, Request, RequestError};
use crate::resize::ReferenceFit;
use crate::smaller::nearest_frames;
use crate::stage_run::{Observer, StageRun};

/// Opens checkpoints by their headers.
pub trait ModelOpener: Send + Sync {
    /// Opens a folder or file.
    ///
    /// # Errors
    /// [`ModelError`]; [`ModelError::NotAPipeline`] if no family recognizes it.
    fn open(&self, path: &Path, precision: &Precision) -> Result<Arc<dyn Model>, ModelError>;
}

/// An open checkpoint, of which only the headers are read: it holds no weights. It plans requests, and computes stages over
/// tensors that the caller passes.
pub trait Model: Send + Sync {
    /// The parts that models of all families have.
    fn parts(&self) -> &ModelParts;

    /// The family's name: `flux`.
    fn family(&self) -> &'static str {
        self.parts().family
    }

    /// The default request; its medium is the one that the model generates.
    fn defaults(&self) -> Request {
        self.parts().defaults.clone()
    }

    /// The request with placeholders for the pictures that the model requires and the request lacks. A placeholder has a size
    /// and no data: such a request can be planned but not run.
    fn with_required_pictures(&self, request: Request) -> Request {
        request
    }

    /// Its components, with exact bytes. Their identity is provisional ([`provisional_identity`](crate::provisional_identity))
    /// until [`Model::files_of`] has been hashed; callers may substitute another identity.
    fn components(&self) -> &[Component] {
        self.parts().components.all()
    }

    /// Load plan of a component.
    fn load_plan(&self, component_name: &str) -> Option<&LoadPlan> {
        self.parts().components.load_plan(component_name)
    }

    /// The format that most of a component's quantized bytes have, made at load or stored; `None` if it is not
    /// quantized.
    fn format_of(&self, component_name: &str) -> Option<WeightFormat> {
        match self.load_plan(component_name)? {
            LoadPlan::Files(sources) => format_of_plan(sources),
            LoadPlan::Synthetic(_) => None,
        }
    }

    /// The components with most of the bytes, which presets quantize.
    fn large_components(&self) -> &[&str] {
        &self.parts().large
    }

    /// The formats to which its components are quantized at load, as asked for when it was opened.
    fn formats(&self) -> &Formats {
        self.parts().components.formats()
    }

    /// A quantization with the large components in `format` where their present format is more accurate. Components that are
    /// stored quantized keep their format.
    fn reduced(&self, from: &Quantization, format: WeightFormat) -> Quantization {
        let large = self.large_components();
        let is_stored = |name: &str| self.format_of(name).is_some() && self.formats().of(name).is_none();
        let reducible: Vec<&str> = large.iter().copied().filter(|name| !is_stored(name)).collect();
        from.reduced(format, large, &reducible)
    }

    /// The same model with these adapters attached, each as separate components in addition to the others.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be attached.
    fn with_adapters(&self, files: &[AdapterFile]) -> Result<Arc<dyn Model>, ModelError> {
        let name = files.first().map(|file| file.name.clone());
        Err(ModelError::Adapter {
            name: name.unwrap_or_default(),
            error: AdapterError::NotTaken {
                family: self.family(),
            },
        })
    }

    /// Reports of its adapters: which components and layers each changes.
    fn adapters(&self) -> Vec<AdapterReport> {
        self.parts().adapters.clone()
    }

    /// The files whose content identifies the component.
    fn files_of(&self, component_name: &str) -> Vec<ModelFile> {
        self.parts().components.files_of(component_name)
    }

    /// The optional fields of a request that the model reads. Requests with other optional fields are refused.
    fn reads(&self) -> Reads;

    /// The stages of a request, in order: [`Model::stages_of`], of a request with the medium and fields that the model
    /// supports.
    ///
    /// # Errors
    /// All invalid fields of the request.
    fn plan(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let made = self.parts().defaults.medium.name();
        if request.medium.name() != made {
            return Err(vec![RequestError::other_medium(&request.medium, made)]);
        }
        let mut problems = self.reads().refusals(request);
        if let (Medium::Image(image), true) = (&request.medium, self.reads().has(Field::References)) {
            problems.extend(self.too_many_references(image.references.len()));
        }
        match self.stages_of(request) {
            Ok(mut stages) if problems.is_empty() => {
                // What was measured of a stage on one card says nothing of a part of it.
                let sampled = stages.iter_mut().filter(|stage| stage.role == Role::Sample);
                for stage in sampled.filter(|_| request.cards > 1) {
                    stage.shape.push_str(&format!(" on {} cards", request.cards));
                }
                Ok(stages)
            }
            Ok(_) => Err(problems),
            Err(others) => Err([others, problems].concat()),
        }
    }

    /// The stages of a request for the model's medium, in order; [`Model::plan`] refuses the optional fields that it does not
    /// read. The values that a [`Role::Decode`] stage takes are the latents that a client may keep, upload
    /// again, and decode later. Only formats and sizes of media count: their data may be left out
    /// ([`Request::without_media_data`]), except for the memos of the stages that encode them.
    ///
    /// # Errors
    /// All other invalid fields of the request.
    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>>;

    /// A default request whose decode takes values of these shapes; `None` if no request has such a decode.
    fn request_of(&self, values: &[ValueShape]) -> Option<Request>;

    /// The ends of a request's texts that the model does not read. An end that one encoder leaves out and another reads is not
    /// among them: CLIP, by design, reads only the first 77 tokens of a prompt.
    fn left_out(&self, _request: &Request) -> Vec<LeftOut> {
        Vec::new()
    }

    /// Most reference pictures of one request.
    fn most_references(&self) -> usize {
        usize::from(self.reads().has(Field::References))
    }

    /// The refusal of `count` reference pictures; `None` if the model takes them.
    fn too_many_references(&self, count: usize) -> Option<RequestError> {
        too_many_references(count, self.most_references())
    }

    /// The sampling of the tracks that the model makes; `None` if it makes none.
    fn track_format(&self) -> Option<SampleFormat> {
        None
    }

    /// How the model takes a reference picture of this size: as it is, unless it prefers another size.
    ///
    /// # Errors
    /// When the picture is too small or too narrow.
    fn reference_fit(&self, width: u32, height: u32) -> Result<ReferenceFit, RequestError> {
        Ok(ReferenceFit::scaled_to((width, height)))
    }

    /// The size of pictures and films, of those that the model makes, next to this one. It is not larger, unless this size is
    /// too small.
    fn size_near(&self, width: u32, height: u32) -> (u32, u32) {
        bounds::size_near(width, height)
    }

    /// The number of frames nearest to this length, of the lengths that the model makes; at least one.
    fn frames_of(&self, seconds: f32, frames_per_second: f32) -> u32 {
        nearest_frames(seconds, frames_per_second)
    }

    /// Smaller variants of a request that may fit where it does not, each with a label, the closest first. They are planned
    /// without the data of media. Called in the queue's task.
    fn smaller(&self, request: &Request) -> Vec<(String, Request)>;

    /// The smallest valid request, in one step: running all its stages proves that the model works.
    fn smallest(&self) -> Request;

    /// The cuDNN shapes of a stage of a request on its first rung, to be compiled before it begins
    /// ([`ops::make_plans`]). Best effort: any list is valid, and the default is empty.
    fn planned(&self, _stage: &str, _request: &Request) -> Vec<ops::Planned> {
        Vec::new()
    }

    /// Runs one stage and returns its values. Pieces are delivered to the observer.
    ///
    /// # Errors
    /// [`StageError`].
    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError>;

    /// Runs stages of several requests in shared passes, on the first rung of each; their plans have equal keys
    /// ([`SharedPass::key`](crate::SharedPass::key)), and at most [`MAX_SETS`](crate::MAX_SETS) sets of adapters, all of which the
    /// model has. Returns the values of each, in their order: one may fail or be cancelled
    /// alone. Steps and cancellation are each stage's own ([`Observer::step_of`], [`Observer::is_cancelled`]). `_kept` is what the
    /// last call has left for this one, or nothing. What it leaves is part of the memory that its stages were planned with, and a pass
    /// after which no request goes on leaves nothing.
    ///
    /// # Errors
    /// [`StageError`], if it concerns all stages.
    fn run_shared(
        &self,
        stages: &[StageRun<'_>],
        _kept: &mut Kept,
        _observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Values, StageError>>, StageError> {
        let name = stages.first().map_or("", |stage| stage.plan.name.as_str());
        Err(StageError::BadInput(format!(
            "{name} runs alone in {}",
            self.family()
        )))
    }
}

/// The format that most quantized bytes of these tensors have.
pub fn format_of_plan<'a>(sources: impl IntoIterator<Item = &'a TensorSource>) -> Option<WeightFormat> {
    let mut bytes: BTreeMap<WeightFormat, Bytes> = BTreeMap::new();
    for source in sources {
        if let Target::Quantized(format) = source.target {
            *bytes.entry(format).or_default() += source.bytes_on_card();
        }
    }
    let most = bytes.into_iter().max_by_key(|(_, bytes)| *bytes);
    most.map(|(format, _)| format)
}
