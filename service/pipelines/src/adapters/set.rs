//! The adapters of an open model, for its plans and its stages.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::DType;
use gpu::ComponentTensors;
use residency::Bytes;

use super::attached::AttachedAdapters;
use super::copies::{Copies, Planned, planned};
use super::open::{Adapter, AdapterPart, open_adapters};
use super::targets::TargetComponent;
use super::{AdapterFile, AdapterUse};
use crate::files::recorded;
use crate::linear::SIDE_BY_SIDE;
use crate::{ComponentSet, ModelError, ModelParts, RequestError, Rung, StageError, StageRun};

/// Which of an adapter's strengths counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsedAs {
    /// The strength in text encoders.
    Text,
    /// The curve over the steps.
    Steps,
}

impl UsedAs {
    /// Whether the adapter changes anything.
    fn is_active(self, each: &AdapterUse) -> bool {
        match self {
            UsedAs::Text => each.text_strength != 0.0,
            UsedAs::Steps => !each.strength.is_zero(),
        }
    }
}

/// The ranks of the terms of convolutions, by adapter and layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConvolutionRanks<'a>(Vec<&'a BTreeMap<String, usize>>);

impl ConvolutionRanks<'_> {
    /// The ranks of a layer's terms, in the order in which they are added.
    pub(crate) fn of(&self, layer: &str) -> impl Iterator<Item = usize> {
        self.0.iter().filter_map(move |layers| layers.get(layer).copied())
    }
}

/// The adapters of an open model.
#[derive(Clone, Debug, Default)]
pub(crate) struct AdapterSet(Vec<Adapter>);

impl AdapterSet {
    /// Opens adapters for a model of `family` (its display name). Adds their components, their reports and the files that were
    /// read for them to `parts`.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be used.
    pub(crate) fn open(
        files: &[AdapterFile],
        family: &'static str,
        targets: &[TargetComponent],
        parts: &mut ModelParts,
    ) -> Result<AdapterSet, ModelError> {
        AdapterSet::open_each(files, family, &|_| targets, parts)
    }

    /// As [`AdapterSet::open`], with the target components of each file. Components that have layers of the same names take the
    /// same terms.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be used.
    pub(crate) fn open_each<'t>(
        files: &[AdapterFile],
        family: &'static str,
        targets_of: &dyn Fn(&AdapterFile) -> &'t [TargetComponent],
        parts: &mut ModelParts,
    ) -> Result<AdapterSet, ModelError> {
        let dtype = parts.dtype();
        let (opened, read) = recorded(|| open_adapters(files, family, targets_of, dtype));
        let adapters = opened?.into_iter().map(|(adapter, files)| {
            for (part, files) in adapter.parts.iter().zip(files) {
                parts.components.push(&part.component, files);
            }
            adapter
        });
        let adapters = AdapterSet(adapters.collect());
        parts.adapters = adapters.0.iter().map(|adapter| adapter.report.clone()).collect();
        parts.read_of_adapters = read;
        Ok(adapters)
    }

    /// Problems of a request's adapters: those that the model was not opened with.
    pub(crate) fn problems(&self, uses: &[AdapterUse]) -> Vec<RequestError> {
        let unknown = uses.iter().filter(|each| self.adapter(&each.name).is_none());
        let problem = |each: &AdapterUse| {
            RequestError::new("adapters", format!("{} is not attached to the model", each.name))
        };
        unknown.map(problem).collect()
    }

    fn adapter(&self, name: &str) -> Option<&Adapter> {
        self.0.iter().find(|adapter| adapter.report.name == name)
    }

    /// The parts for a component of the adapters that a request uses.
    fn parts<'a>(
        &'a self,
        uses: &'a [AdapterUse],
        base: &'a str,
        used_as: UsedAs,
    ) -> impl Iterator<Item = (&'a AdapterUse, &'a AdapterPart)> {
        let active = uses.iter().filter(move |each| used_as.is_active(each));
        active.flat_map(move |each| {
            let parts = self
                .adapter(&each.name)
                .into_iter()
                .flat_map(|adapter| &adapter.parts);
            parts
                .filter(move |part| part.base == base)
                .map(move |part| (each, part))
        })
    }

    /// These components, and the components of the adapters that a request uses on them.
    pub(crate) fn beside(&self, bases: &[&str], uses: &[AdapterUse], used_as: UsedAs) -> Vec<String> {
        let parts = bases.iter().flat_map(|base| self.parts(uses, base, used_as));
        let own = bases.iter().map(|&base| base.to_owned());
        own.chain(parts.map(|(_, part)| part.component.clone())).collect()
    }

    /// Predicted scratch of the terms of a component's layers, which are computed one after the other.
    pub(crate) fn scratch(&self, base: &str, tokens: usize, dtype: DType) -> Bytes {
        let parts = self.0.iter().flat_map(|adapter| &adapter.parts);
        let of_part = |part: &AdapterPart| {
            let rank = SIDE_BY_SIDE * part.rank;
            let of_shape = |shape: &[usize; 2]| ops::low_rank_scratch(*shape, rank, tokens, dtype);
            part.shapes.iter().map(of_shape).max()
        };
        let of_parts = parts.filter(|part| part.base == base).filter_map(of_part);
        Bytes(of_parts.max().unwrap_or_default())
    }

    /// Predicted scratch, in addition, of the adapters that a request uses on a component in a pass of several sets over so many rows:
    /// copies of their factors, and the rows projected down.
    pub(crate) fn scratch_of_set(
        &self,
        base: &str,
        uses: &[AdapterUse],
        tokens: usize,
        dtype: DType,
    ) -> Bytes {
        let parts = self.parts(uses, base, UsedAs::Steps).map(|(_, part)| part);
        let of_part = |part: &AdapterPart| {
            let factors = part
                .numbers
                .iter()
                .map(|count| ops::allocated(count * dtype.size_in_bytes()));
            factors.sum::<u64>() + ops::projected_rows(SIDE_BY_SIDE * part.rank, tokens, dtype)
        };
        Bytes(parts.map(of_part).sum())
    }

    /// Most bytes of copies of a layer's factors, by the terms of all adapters: layers over a part of the columns copy theirs.
    pub(crate) fn copied(&self, base: &str, dtype: DType) -> Bytes {
        let parts = self.0.iter().flat_map(|adapter| &adapter.parts);
        let of_base = parts.filter(|part| part.base == base);
        let bytes = of_base.map(|part| ops::allocated(part.largest_numbers * dtype.size_in_bytes()));
        Bytes(bytes.sum())
    }

    /// The ranks of the terms of a component's convolutions, of the adapters that a request uses.
    pub(crate) fn convolution_ranks<'a>(
        &'a self,
        base: &'a str,
        uses: &'a [AdapterUse],
    ) -> ConvolutionRanks<'a> {
        let parts = self.parts(uses, base, UsedAs::Steps);
        ConvolutionRanks(parts.map(|(_, part)| &part.convolutions).collect())
    }

    /// The rungs of sampling with this scratch: all components resident, or, if there are adapters, with the adapters in host
    /// memory.
    pub(crate) fn rungs(&self, base: &str, uses: &[AdapterUse], scratch: Bytes, dtype: DType) -> Vec<Rung> {
        let whole = Rung::whole(scratch);
        let parts: Vec<&AdapterPart> = self
            .parts(uses, base, UsedAs::Steps)
            .map(|(_, part)| part)
            .collect();
        let names: Vec<String> = parts.iter().map(|part| part.component.clone()).collect();
        // Of layers side by side all factors are on the card at once.
        let largest = parts
            .iter()
            .map(|part| part.largest_numbers)
            .max()
            .unwrap_or_default();
        let copied = SIDE_BY_SIDE * parts.len() * largest * dtype.size_in_bytes();
        let from_host = (!names.is_empty()).then(|| whole.with_from_host(names, Bytes(copied as u64)));
        std::iter::once(whole).chain(from_host).collect()
    }

    /// The rung of sampling with this scratch that keeps copies of weights; `None` if there are none to keep. `rows_of` says how many
    /// rows the layer of a weight has in a step.
    pub(crate) fn rung_with_copies(
        &self,
        of: (&str, &ComponentSet),
        uses: &[AdapterUse],
        scratch: Bytes,
        rows_of: impl Fn(&str) -> usize,
    ) -> Option<Rung> {
        let planned = self.planned_copies(of, uses, rows_of)?;
        Some(Rung::whole(scratch).with_copies(planned.layers, planned.bytes))
    }

    /// By layer, the bytes of the copies of weights that shared passes keep for the adapters that a request uses: those in full
    /// precision. `rows_of` says how many rows the layer of a weight has in all passes together.
    pub(crate) fn copies_in_passes(
        &self,
        of: (&str, &ComponentSet),
        uses: &[AdapterUse],
        rows_of: impl Fn(&str) -> usize,
    ) -> BTreeMap<String, Bytes> {
        let planned = self.planned_copies(of, uses, rows_of);
        planned.map_or(BTreeMap::new(), |planned| planned.of_numbers)
    }

    /// The copies of weights for the adapters that a request uses; `None` if there are none to keep.
    fn planned_copies(
        &self,
        (base, components): (&str, &ComponentSet),
        uses: &[AdapterUse],
        rows_of: impl Fn(&str) -> usize,
    ) -> Option<Planned> {
        let are_constant = uses.iter().all(|each| each.strength.is_constant());
        let parts = self.parts(uses, base, UsedAs::Steps).map(|(_, part)| part);
        let planned = planned(parts, components, base, rows_of, components.dtype());
        (are_constant && !planned.layers.is_empty()).then_some(planned)
    }

    /// The uses that change these text encoders, reduced to the part that text encoders read: the strength in text encoders.
    pub(crate) fn text_uses(&self, bases: &[&str], uses: &[AdapterUse]) -> Vec<AdapterUse> {
        let is_one = |each: &&AdapterUse| {
            let one = std::slice::from_ref(*each);
            bases
                .iter()
                .any(|base| self.parts(one, base, UsedAs::Text).next().is_some())
        };
        let of_text = |each: &AdapterUse| AdapterUse {
            strength: super::StrengthCurve::zero(),
            ..each.clone()
        };
        uses.iter().filter(is_one).map(of_text).collect()
    }

    /// Attaches the adapters that a request uses on the component that samples, with the copies of the stage's rung.
    ///
    /// # Errors
    /// When a component is not resident; when memory is exhausted.
    pub(crate) fn attach_to_sampler(
        &self,
        base: &str,
        run: &StageRun<'_>,
        dtype: DType,
    ) -> Result<AttachedAdapters, StageError> {
        let attached = self.attach_sets(base, &[run], dtype)?.into_iter().next();
        Ok(attached.unwrap_or_default())
    }

    /// Attaches the sets of adapters that stages in shared passes use, the set of each of these, with the copies of the rung of the
    /// first.
    ///
    /// # Errors
    /// When a component is not resident; when memory is exhausted.
    pub(crate) fn attach_sets(
        &self,
        base: &str,
        runs: &[&StageRun<'_>],
        dtype: DType,
    ) -> Result<Vec<AttachedAdapters>, StageError> {
        let Some(first) = runs.first() else {
            return Ok(Vec::new());
        };
        let component = (first.tensors)(base)?;
        let copies = Copies::of(first.copied(), &component, runs.len(), (dtype, first.device))?;
        let sets = runs.iter().map(|run| {
            let attached = self.attach(&run.request.adapters, base, UsedAs::Steps, run.tensors)?;
            Ok(attached.with_copies(copies.clone()))
        });
        sets.collect()
    }

    /// Attaches the adapters that a request uses on a component.
    ///
    /// # Errors
    /// When a component is not resident.
    pub(crate) fn attach(
        &self,
        uses: &[AdapterUse],
        base: &str,
        used_as: UsedAs,
        tensors: &dyn Fn(&str) -> Result<Arc<ComponentTensors>, StageError>,
    ) -> Result<AttachedAdapters, StageError> {
        let mut attached = AttachedAdapters::default();
        for (each, part) in self.parts(uses, base, used_as) {
            let curve = match used_as {
                UsedAs::Steps => each.strength.clone(),
                UsedAs::Text => super::StrengthCurve::constant(each.text_strength)
                    .map_err(|error| StageError::BadInput(format!("text_strength {error}")))?,
            };
            attached.add(part, tensors(&part.component)?, curve);
        }
        Ok(attached)
    }
}
