//! The same model in smaller formats: the alternatives that a refusal offers before smaller pictures. Models have to be opened for
//! that, so it is done only when a refusal is near, and outside the core; the refusal waits for the result.

use gpu::{CardDescription, WeightFormat};
use model::{Preset, Quantization};
use residency::Bytes;

use super::open_for;
use super::record::JobRecord;
use super::request::OpenModels;
use crate::error::{Change, ChangedTo};
use crate::library::{Entry, Library, OpenModel};

/// A quantization of a job's model in which it is smaller, or larger.
pub(super) struct Reduction {
    /// Label for people, in words that a request can use.
    pub(super) label: String,
    pub(super) entry: Entry,
    pub(super) models: OpenModels,
}

/// The state of the reductions of a job's model.
#[derive(Default)]
pub(super) enum Reductions {
    /// They have not been requested.
    #[default]
    Unknown,
    /// They are being opened.
    Opening,
    /// The most faithful first.
    Known(Vec<Reduction>),
}

impl Reduction {
    /// The change of a request that uses it.
    pub(super) fn change(&self) -> Change {
        Change {
            label: self.label.clone(),
            to: ChangedTo::Quantization(self.entry.quantization.clone()),
        }
    }
}

impl JobRecord {
    pub(super) fn reductions(&self) -> &[Reduction] {
        match &self.reductions {
            Reductions::Known(reductions) => reductions,
            Reductions::Unknown | Reductions::Opening => &[],
        }
    }

    /// Whether the alternatives are known that a refusal names, so that it can be sent.
    pub(super) fn knows_reductions(&self) -> bool {
        matches!(self.reductions, Reductions::Known(_))
    }

    /// Whether the job's refusal is near: its reductions were requested.
    pub(super) fn is_near_refusal(&self) -> bool {
        !matches!(self.reductions, Reductions::Unknown)
    }
}

/// Opens an entry in each format that makes it smaller. Formats that cannot be opened are left out.
pub(super) fn open_reductions(
    library: &Library,
    entry: &Entry,
    models: &OpenModels,
    cards: &[CardDescription],
) -> Vec<Reduction> {
    let Some(open) = models.values().next() else {
        return Vec::new();
    };
    let mut reductions: Vec<Reduction> = Vec::new();
    // Plain int8 has the bytes of rotated int8, which is offered.
    let offered = WeightFormat::MADE_AT_LOAD
        .into_iter()
        .filter(|format| *format != WeightFormat::Int8);
    for format in offered {
        let quantization = open.model.reduced(&entry.quantization, format);
        if quantization == entry.quantization
            || reductions.iter().any(|r| r.entry.quantization == quantization)
        {
            continue;
        }
        let smaller = entry.quantized(quantization);
        match open_for(library, &smaller, cards) {
            Ok(reduced) if bytes_of(reduced.values().next()) < bytes_of(Some(open)) => {
                reductions.push(Reduction {
                    label: label_of(&smaller.quantization),
                    entry: smaller,
                    models: reduced,
                });
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(entry = smaller.key, %error, "not offered"),
        }
    }
    reductions
}

/// Opens an entry in each preset that makes it larger: the one that loses the least first.
pub(super) fn open_upgrades(
    library: &Library,
    entry: &Entry,
    models: &OpenModels,
    cards: &[CardDescription],
) -> Vec<Reduction> {
    let bytes = bytes_of(models.values().next());
    let presets = Preset::ALL.into_iter().map(Quantization::preset);
    let entries = presets.map(|quantization| entry.quantized(quantization));
    let upgrades = entries.filter_map(|larger| {
        let models = open_for(library, &larger, cards).ok()?;
        (bytes_of(models.values().next()) > bytes).then(|| Reduction {
            label: label_of(&larger.quantization),
            entry: larger,
            models,
        })
    });
    let mut upgrades: Vec<Reduction> = upgrades.collect();
    upgrades.sort_by_key(|upgrade| std::cmp::Reverse(bytes_of(upgrade.models.values().next())));
    upgrades
}

fn bytes_of(open: Option<&OpenModel>) -> Bytes {
    let components = open.map(|open| &open.components[..]).unwrap_or_default();
    components.iter().map(|c| c.bytes).sum()
}

/// `quantization 8-bit (int8-convrot)`, or by component where no preset equals it.
fn label_of(quantization: &Quantization) -> String {
    if *quantization == Quantization::NONE {
        return "quantization full".to_owned();
    }
    match quantization
        .as_preset()
        .and_then(|preset| Some((preset, preset.format()?)))
    {
        Some((preset, format)) => format!("quantization {} ({format})", preset.as_str()),
        None => format!("quantization {quantization}"),
    }
}
