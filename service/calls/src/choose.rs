//! Quantization `auto`: the service chooses the formats of a model.

use std::sync::Arc;
use std::time::Duration;

use engine::Error;
use engine::job::{Call, JobOptions, JobSpec, JobWork};
use engine::library::Entry;
use engine::queue::{PlanReport, PlannedStage, StageVerdict};
use gpu::WeightFormat;
use model::{
    AdapterFile, AdapterKind, AdapterUse, Medium, Model, Preset, Quantization, Request, StrengthCurve,
};
use residency::Bytes;

use crate::entries::Entries;
use crate::errors::invalid;
use crate::references::{AskedControl, AskedFormats, ModelRef};
use crate::runs::{controls_of, whole_run};

/// The preset that leaves the formats to the service, also in an id (`ID+auto`).
const AUTO: &str = "auto";
const AUTO_SUFFIX: &str = "+auto";

/// How long a choice waits for a card to become ready: longer than the start of a worker.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// The formats that were chosen for a model.
pub(crate) struct Chosen {
    pub(crate) entry: Arc<Entry>,
    /// The chosen formats and the reason, for display; empty where the client named the formats.
    pub(crate) reason: String,
}

/// The reference without `auto`, if it leaves the formats to the service.
pub(crate) fn left_open(model: &ModelRef) -> Result<Option<ModelRef>, Error> {
    let asked = &model.formats;
    let id = match (asked.preset.as_str(), model.id.strip_suffix(AUTO_SUFFIX)) {
        (AUTO, None) => model.id.clone(),
        (AUTO | "", Some(id)) => id.to_owned(),
        _ => return Ok(None),
    };
    if !asked.components.is_empty() {
        return Err(invalid(
            "model.quantization.components",
            "must be empty where the preset is auto, which chooses every format; name a preset to override components of it",
        ));
    }
    Ok(Some(ModelRef {
        id,
        formats: AskedFormats::default(),
        ..model.clone()
    }))
}

impl Entries {
    /// The best formats of a model that fit a card beside pins, reservations and other programs. Formats in which the model is in
    /// use already go first, so that it is not loaded twice. Of the others the best whose steps hardly wait for weights that are
    /// streamed ([`cost_of`]); where there is none, those of which the fewest bytes are. The measure is the model's default request,
    /// with these ControlNets.
    /// Where nothing fits, it is the smallest format that may fit once memory becomes free, else the model as stored: its refusal
    /// names the alternatives that would fit.
    ///
    /// # Errors
    /// When its id names formats, the model cannot be opened, or no card becomes ready.
    pub(crate) async fn choose(
        &self,
        stored: Arc<Entry>,
        controls: &[AskedControl],
        options: JobOptions,
    ) -> Result<Chosen, Error> {
        if stored.quantization != Quantization::NONE {
            let problem = format!(
                "says {} already, and with auto the service chooses: leave one of them out",
                stored.quantization
            );
            return Err(invalid("model.id", problem));
        }
        self.wait_for_card().await?;
        let known = self.queue.known_entries().await;
        let is_in_use = |formats: &Quantization| {
            let mut known = known.iter();
            known.any(|entry| entry.path == stored.path && entry.quantization == *formats)
        };
        let model = self.open(&stored).await?.model;
        let formats = |format: Option<WeightFormat>| match format {
            None => Quantization::NONE,
            Some(format) => model.reduced(&Quantization::NONE, format),
        };
        let by_preset = Preset::ALL.into_iter().flat_map(|preset| {
            let faster = preset
                .format_of_fp8_products()
                .map(|format| (formats(Some(format)), true));
            faster.into_iter().chain([(formats(preset.format()), false)])
        });
        let mut candidates: Vec<(Quantization, bool)> = by_preset.collect();
        candidates.dedup_by(|one, before| one.0 == before.0); // where all is stored quantized
        let (in_use, others): (Vec<_>, Vec<_>) = candidates
            .into_iter()
            .partition(|(formats, _)| is_in_use(formats));
        let mut refused: Option<String> = None;
        // Why the last candidate, which has the fewest bytes, was refused.
        let mut smallest = String::new();
        let (mut possible, mut streamed) = (None, None);
        for (formats, for_fp8_products) in in_use.into_iter().chain(others) {
            let entry = Arc::new(stored.quantized(formats));
            let plan = self
                .plan_default(entry.clone(), controls, options.clone())
                .await?;
            if for_fp8_products && !plan.has_fp8_products && !is_in_use(&entry.quantization) {
                continue;
            }
            if plan.fits {
                let cost = cost_of(&plan);
                let reason = match (is_in_use(&entry.quantization), cost) {
                    (true, _) => "it is in use in these formats".to_owned(),
                    (false, Cost::TooMuch(why)) => {
                        smallest = format!("{} would have {why}", entry.quantization);
                        refused.get_or_insert_with(|| smallest.clone());
                        streamed = Some(entry);
                        continue;
                    }
                    (false, Cost::Little(what)) => with_reason_against(what, refused),
                    (false, Cost::Nothing) => refused.unwrap_or_else(|| format!("it fits {}", plan.card)),
                };
                return Ok(Chosen::new(entry, &reason));
            }
            smallest = reason_against(&entry.quantization, &plan);
            refused.get_or_insert_with(|| smallest.clone());
            if plan
                .stages
                .iter()
                .all(|stage| stage.verdict != StageVerdict::Never)
            {
                possible = Some(entry);
            }
        }
        if let Some(entry) = streamed {
            let reason = format!("{smallest}, and other formats more");
            return Ok(Chosen::new(entry, &reason));
        }
        match possible {
            Some(entry) => Ok(Chosen::new(entry, &refused.unwrap_or_default())),
            // Nothing was chosen: no format is named.
            None => Ok(Chosen {
                entry: stored,
                reason: format!("nothing fits: {smallest}"),
            }),
        }
    }

    /// A plan of the model's default request, with these options.
    async fn plan_default(
        &self,
        entry: Arc<Entry>,
        controls: &[AskedControl],
        options: JobOptions,
    ) -> Result<PlanReport, Error> {
        let open = self.open(&entry).await?;
        let mut request = self.default_request(&entry, &*open.model);
        if let Medium::Image(image) = &mut request.medium {
            image.controls = controls_of(controls, &entry, (image.width, image.height));
        }
        let run = whole_run(Call::Plan, request);
        let (card, work) = (options.card_hint.clone(), JobWork::Run(run));
        self.queue
            .plan_as_asked(JobSpec { options, entry, work }, &card)
            .await
    }

    /// The default request of a model, with the configured values over the model's own, its adapters at full strength, and
    /// stand-ins for the pictures that it requires.
    pub(crate) fn default_request(&self, entry: &Entry, model: &dyn Model) -> Request {
        let request = self.models.defaults(&entry.id, model.defaults());
        let mut request = model.with_required_pictures(request);
        let used = |file: &AdapterFile| {
            Some(AdapterUse {
                name: file.name.clone(),
                strength: StrengthCurve::constant(1.0).ok()?,
                text_strength: 1.0,
            })
        };
        let is_lora = |file: &&AdapterFile| file.kind == AdapterKind::Lora;
        request.adapters = entry.adapters.iter().filter(is_lora).filter_map(used).collect();
        request
    }

    /// Returns when some card is ready, as a plan needs its memory. Right after the start of the service no card is ready yet.
    async fn wait_for_card(&self) -> Result<(), Error> {
        let mut reports = self.queue.status();
        let is_ready = reports.wait_for(|report| report.cards.iter().any(|card| card.state.is_ready()));
        match tokio::time::timeout(READY_LIMIT, is_ready).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(Error::ShuttingDown),
            Err(_) => Ok(()), // the plan says why none is ready
        }
    }
}

impl Chosen {
    fn new(entry: Arc<Entry>, reason: &str) -> Chosen {
        let reason = format!("{}: {reason}", entry.quantization);
        Chosen { entry, reason }
    }
}

/// What the weights that are streamed again in each step of a request cost.
enum Cost {
    Nothing,
    /// Less than a tenth of the request's time: what is streamed, and what it costs.
    Little(String),
    /// More than that, or it is unknown: what is streamed, and what it costs.
    TooMuch(String),
}

/// The most that streaming may add to a request, as a share of its time with all weights on the card.
const WORTH_STREAMING: f64 = 0.1;

/// What streaming costs in a plan, by the speeds of its card. Unknown speeds: any weights that are streamed again are too much.
fn cost_of(plan: &PlanReport) -> Cost {
    let again: Bytes = plan.stages.iter().map(PlannedStage::streamed_again).sum();
    if again == Bytes::ZERO {
        return Cost::Nothing;
    }
    let what = format!("{again} streamed to {} in each step", plan.card);
    let Some(seconds) = plan.seconds().filter(|seconds| seconds.resident > 0.0) else {
        return Cost::TooMuch(what);
    };
    let share = seconds.more() / seconds.resident;
    let what = format!(
        "{what}, which takes {:.1} s more than the {:.1} s of a request without ({:.0}%)",
        seconds.more(),
        seconds.resident,
        share * 100.0
    );
    match share < WORTH_STREAMING {
        true => Cost::Little(what),
        false => Cost::TooMuch(what),
    }
}

/// What formats have streamed, and why better ones were refused.
fn with_reason_against(streamed: String, refused: Option<String>) -> String {
    match refused {
        Some(refused) => format!("{streamed}; {refused}"),
        None => streamed,
    }
}

/// `full needs 31.2 GiB in its denoise stage, of which cuda:0 has 23.6 GiB`.
fn reason_against(formats: &Quantization, plan: &PlanReport) -> String {
    let short = plan.stages.iter().filter_map(|stage| stage.shortfall.as_ref());
    match short.max_by_key(|shortfall| shortfall.needed) {
        Some(shortfall) => format!(
            "{formats} needs {} in its {} stage, and {} has {} for it beside what is pinned, reserved or of other programs",
            shortfall.needed, shortfall.stage, plan.card, shortfall.free
        ),
        None => format!("{formats} does not fit {}", plan.card),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_selected_by_preset_or_id_and_excludes_component_formats() {
        let of = |id: &str, preset: &str| ModelRef {
            id: id.to_owned(),
            formats: AskedFormats {
                preset: preset.to_owned(),
                ..Default::default()
            },
            ..Default::default()
        };
        for model in [of("a/b", "auto"), of("a/b+auto", ""), of("a/b+auto", "auto")] {
            let open = left_open(&model).unwrap().unwrap();
            assert_eq!((open.id.as_str(), open.formats.is_open()), ("a/b", true));
        }
        assert_eq!(left_open(&of("", "auto")).unwrap().unwrap().id, "");
        for model in [
            of("a/b", ""),
            of("a/b", "4-bit"),
            of("a/b+4-bit", ""),
            of("a/b+auto", "8-bit"),
        ] {
            assert_eq!(left_open(&model).unwrap(), None, "{model:?}");
        }
        let mut both = of("a/b", "auto");
        both.formats.components.insert("vae".to_owned(), "nf4".to_owned());
        assert!(left_open(&both).is_err());
    }
}
