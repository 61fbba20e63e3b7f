//! What passes of one key have in common, and a round leaves to the next.

use std::rc::Rc;

use candle_core::{DType, Device, Tensor};

use super::buffers::StepBuffers;
use super::config::TransformerConfig;
use super::padded::{Lengths, Padded, PaddedConditions};
use super::sampling::Attends;
use super::transformer::{Conditioning, Item, Times, Transformer};
use crate::adapters::AttachedAdapters;
use crate::{HostTensor, StageError};

/// Passes that are remembered, of those in one set of buffers: those of each number of requests, with and without a condition.
const PASSES: usize = 16;

/// The handles of weights, the factors of adapters side by side, the keys and values of conditions, the modulations of steps, and the
/// buffers with the passes that were recorded in them.
pub(super) struct KeptPass {
    /// [`SharedPass::key`](crate::SharedPass::key).
    pub(super) key: String,
    /// The layers of whose weights it has copies.
    pub(super) copied: Vec<String>,
    /// The names of the sets of adapters, in the order of their numbers.
    pub(super) named: Vec<String>,
    pub(super) sets: Vec<AttachedAdapters>,
    pub(super) transformer: Transformer,
    /// The conditionings of requests, by the values that they are made from.
    pub(super) conditionings: MadeFrom<HostTensor, Conditioning>,
    /// The contexts of new tracks, by the silence in them.
    pub(super) contexts: MadeFrom<HostTensor, Tensor>,
    /// The modulations of the steps of requests, by their sigmas.
    pub(super) times: MadeFrom<Vec<f32>, Times>,
    pub(super) buffers: Option<PassBuffers>,
}

impl KeptPass {
    /// Whether it is of this configuration and key, with copies of these weights, and of exactly the sets of these names, each named
    /// once or more.
    pub(super) fn serves(
        &self,
        config: &TransformerConfig,
        (key, copied): (&str, &[String]),
        names: &[String],
    ) -> bool {
        self.transformer.config() == config
            && self.key == key
            && self.copied == copied
            && names.iter().all(|name| self.named.contains(name))
            && self.named.iter().all(|name| names.contains(name))
    }

    /// Number of the set of this name; the first if there is none.
    pub(super) fn number_of(&self, name: &str) -> usize {
        self.named.iter().position(|other| other == name).unwrap_or(0)
    }
}

/// What something is made from, with a set of adapters.
pub(super) trait Source: Clone {
    /// Whether the same is made from another one.
    fn is_same(&self, other: &Self) -> bool;
}

impl Source for HostTensor {
    /// A value that a worker was sent once is the same memory in all requests, which is not compared.
    fn is_same(&self, other: &HostTensor) -> bool {
        std::ptr::eq(&*other.data, &*self.data) || other == self
    }
}

impl Source for Vec<f32> {
    fn is_same(&self, other: &Vec<f32>) -> bool {
        self == other
    }
}

/// What stages make from sources, each with a set of adapters: requests in which both are equal have one.
pub(super) struct MadeFrom<S, T>(Vec<(S, usize, Rc<T>)>);

impl<S, T> Default for MadeFrom<S, T> {
    fn default() -> Self {
        MadeFrom(Vec::new())
    }
}

impl<S: Source, T> MadeFrom<S, T> {
    /// What is made from a source with a set of adapters, by `make` the first time.
    ///
    /// # Errors
    /// Errors of `make`.
    pub(super) fn of<E>(
        &mut self,
        (source, set): (&S, usize),
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Rc<T>, E> {
        let mut all = self.0.iter();
        if let Some((_, _, made)) = all.find(|(other, of, _)| *of == set && source.is_same(other)) {
            return Ok(Rc::clone(made));
        }
        let made = Rc::new(make()?);
        self.0.push((source.clone(), set, Rc::clone(&made)));
        Ok(made)
    }

    /// Drops all but those from these sources with these sets.
    pub(super) fn keep_only(&mut self, sources: &[(&S, usize)]) {
        self.0.retain(|(source, set, _)| {
            let mut of_set = sources.iter().filter(|(_, of)| of == set);
            of_set.any(|(other, _)| source.is_same(other))
        });
    }

    fn has(&self, one: &Rc<T>) -> bool {
        self.0.iter().any(|(_, _, made)| Rc::ptr_eq(made, one))
    }
}

/// The requests of a pass: the place of each in the buffers, and what it attends to.
type Requests = Vec<(usize, Rc<Conditioning>)>;

fn is_equal(requests: &Requests, others: &Requests) -> bool {
    let mut both = requests.iter().zip(others);
    requests.len() == others.len()
        && both.all(|((place, of), (other, of_other))| place == other && Rc::ptr_eq(of, of_other))
}

/// A pass over certain requests.
struct KnownPass {
    attends: Attends,
    requests: Requests,
    /// Where each request attends to a row.
    lengths: Option<Lengths>,
    /// How often it was computed without being recorded.
    count: u32,
    recorded: Option<ops::RecordedWork>,
}

/// The buffers of passes over a number of requests, and passes that were recorded in them.
pub(super) struct PassBuffers {
    pub(super) steps: StepBuffers,
    /// The modulations of the steps of a pass, a row for each request.
    modulations: Tensor,
    /// Rows for the conditionings of requests, by what passes attend to.
    padded: Vec<(Attends, PaddedConditions)>,
    /// In the order of their last use.
    known: Vec<KnownPass>,
}

impl PassBuffers {
    /// For passes over so many requests, of so many frames each.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn new(
        transformer: &Transformer,
        (batch, frames): (usize, usize),
        on @ (dtype, device): (DType, &Device),
    ) -> candle_core::Result<PassBuffers> {
        Ok(PassBuffers {
            steps: transformer.shared_buffers((batch, frames), on)?,
            modulations: ops::blank(&[batch, transformer.modulations()], dtype, device)?,
            padded: Vec::new(),
            known: Vec::new(),
        })
    }

    /// Whether they are for so many requests.
    pub(super) fn are_for(&self, batch: usize) -> bool {
        self.steps.inputs.len() == batch
    }

    /// Drops the recorded passes over conditionings that are not kept, and rows with any of them.
    pub(super) fn keep_only(&mut self, kept: &MadeFrom<HostTensor, Conditioning>) {
        self.known
            .retain(|known| known.requests.iter().all(|(_, of)| kept.has(of)));
        self.keep_rows(|_, rows| rows.conditions().all(|of| kept.has(of)));
    }

    /// Keeps the rows for a kind of pass that are chosen, and drops the others, with the passes that were recorded over them.
    fn keep_rows(&mut self, is_kept: impl Fn(Attends, &PaddedConditions) -> bool) {
        self.padded.retain(|(attends, rows)| is_kept(*attends, rows));
        let has_rows = |attends: Attends| self.padded.iter().any(|(of, _)| *of == attends);
        self.known
            .retain(|known| known.lengths.is_none() || has_rows(known.attends));
    }

    /// Makes rows for the conditionings of all requests of a round, by what its passes attend to, where they serve. Those of the round before
    /// stay if they are the same.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn begin_round(
        &mut self,
        round: &[(Attends, Vec<Rc<Conditioning>>)],
    ) -> candle_core::Result<()> {
        self.keep_rows(|attends, rows| {
            let mut all = round.iter();
            all.any(|(of, conditions)| *of == attends && rows.is_for(conditions))
        });
        for (attends, conditions) in round {
            if !self.padded.iter().any(|(of, _)| of == attends)
                && let Some(rows) = PaddedConditions::for_all(conditions)?
            {
                self.padded.push((*attends, rows));
            }
        }
        Ok(())
    }

    /// Takes the modulations of the step of the request of this number in a pass.
    ///
    /// # Errors
    /// When there is no such request; errors of the device.
    pub(super) fn put_modulations(&self, number: usize, of_step: &Tensor) -> candle_core::Result<()> {
        ops::copy_rows(of_step, &self.modulations.narrow(0, number, 1)?)
    }

    /// Computes a pass from what the buffers were given. A pass that comes again is recorded: where requests are short, its launches
    /// take as long as its work.
    ///
    /// # Errors
    /// As of [`Transformer::compute`].
    pub(super) fn compute(
        &mut self,
        transformer: &Transformer,
        (attends, requests): (Attends, Requests),
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        go_on()?;
        let conditions: Vec<Rc<Conditioning>> = requests.iter().map(|(_, of)| Rc::clone(of)).collect();
        let mut of_pass = self.padded.iter_mut().filter(|(of, _)| *of == attends);
        let rows = of_pass.next().map(|(_, rows)| rows);
        let rows = match rows.filter(|rows| rows.serves(&conditions)) {
            Some(rows) => {
                rows.take(&conditions)?;
                Some(&*rows)
            }
            None => None,
        };
        let modulations = self.modulations.narrow(0, 0, requests.len())?;
        let items = requests.iter().map(|(place, conditioning)| Item {
            place: *place,
            conditioning,
        });
        let items: Vec<Item<'_>> = items.collect();
        let is_this = |known: &KnownPass| {
            known.attends == attends
                && known.lengths.is_some() == rows.is_some()
                && is_equal(&known.requests, &requests)
        };
        let mut known = match self.known.iter().position(is_this) {
            Some(place) => self.known.remove(place),
            None => KnownPass {
                attends,
                requests: requests.clone(),
                lengths: match rows {
                    Some(_) => Lengths::of(&conditions, self.steps.tokens.sum.dim(1)?)?,
                    None => None,
                },
                count: 0,
                recorded: None,
            },
        };
        let padded = rows.zip(known.lengths.as_ref());
        let padded = padded.map(|(rows, lengths)| Padded { rows, lengths });
        let queue = |go_on: &mut dyn FnMut() -> _| {
            transformer.compute((&items, padded), &modulations, &self.steps, go_on)
        };
        // The first pass has made what it needs: plans, workspaces. A pass that cannot be recorded yet is tried again, ever less often.
        if known.recorded.is_none() && known.count.is_power_of_two() && transformer.is_whole() {
            let device = self.steps.output.device();
            known.recorded = ops::record(device, || queue(&mut || Ok(())));
        }
        match &known.recorded {
            Some(recorded) => recorded.run()?,
            None => {
                known.count += 1;
                queue(go_on)?;
            }
        }
        if self.known.len() == PASSES {
            self.known.remove(0);
        }
        self.known.push(known);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_sources_with_one_set_have_one_result_while_they_are_kept() {
        let mut all = MadeFrom::<Vec<f32>, usize>::default();
        let made = std::cell::Cell::new(0);
        let mut of = |source: &[f32], set: usize| {
            let make = || {
                made.set(made.get() + 1);
                Ok::<_, ()>(made.get())
            };
            all.of((&source.to_vec(), set), make).map(|made| *made)
        };
        assert_eq!(of(&[1.0, 0.5], 0), Ok(1));
        assert_eq!(of(&[1.0, 0.5], 0), Ok(1));
        assert_eq!(of(&[1.0, 0.5], 1), Ok(2), "another set");
        assert_eq!(of(&[1.0], 0), Ok(3));
        let kept = all.of((&vec![1.0], 0), || Err(())).unwrap();
        all.keep_only(&[(&vec![1.0], 0), (&vec![1.0, 0.5], 2)]);
        assert_eq!(all.0.len(), 1);
        assert!(all.has(&kept) && !all.has(&Rc::new(3)));
        assert!(all.of((&vec![1.0, 0.5], 0), || Err(())).is_err());
    }
}
