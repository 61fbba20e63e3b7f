//! Conditions of different lengths as one batch: each item of a pass attends to a row of its own, and all do so in one operation.

use std::rc::Rc;

use candle_core::{DType, Result, Tensor};
use ops::allocated;

use super::config::TransformerConfig;
use super::layers::Others;
use super::transformer::Conditioning;

/// The fewest tokens that a row has.
const FEWEST: usize = 256;

/// The tokens of a row for a condition of so many. There are few such lengths, so conditions of different prompts mostly have one, and
/// attention needs few plans.
pub(super) fn padded_length(tokens: usize) -> usize {
    tokens.next_power_of_two().max(FEWEST)
}

/// Whether all of these are one condition, to which items attend as one.
fn is_one(conditions: &[Rc<Conditioning>]) -> bool {
    let mut pairs = conditions.windows(2);
    pairs.all(|pair| matches!(pair, [one, other] if Rc::ptr_eq(one, other)))
}

/// Bytes of the rows of a request for conditions of so many tokens each.
pub(super) fn bytes_of_rows(config: &TransformerConfig, conditions: &[usize], dtype: DType) -> u64 {
    let of_row = |tokens: &usize| {
        let of_block = padded_length(*tokens) * config.layer.keys() * dtype.size_in_bytes();
        // Keys and values of each block, and the zeros.
        (2 * config.num_hidden_layers as u64 + 1) * allocated(of_block)
    };
    conditions.iter().map(of_row).sum()
}

/// Rows for the conditions of a kind of pass in a round: keys and values, padded to one length.
pub(super) struct PaddedConditions {
    /// Tokens of a row.
    length: usize,
    /// Keys and values for each block, `[rows, length, heads, head_dim]`. What follows a condition is zeros: it is multiplied by zero, which
    /// is not zero for what is not finite.
    blocks: Vec<(Tensor, Tensor)>,
    /// `[1, length, heads, head_dim]`.
    zeros: Tensor,
    /// The condition in each row.
    rows: Vec<Option<Rc<Conditioning>>>,
}

impl PaddedConditions {
    /// Rows for these conditions of the requests of a round; `None` where they are one condition, or have no length in common.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn for_all(conditions: &[Rc<Conditioning>]) -> Result<Option<PaddedConditions>> {
        let Some(length) = length_of_all(conditions) else {
            return Ok(None);
        };
        let of_rows = |one: &Tensor, rows: usize| {
            let (_, _, heads, width) = one.dims4()?;
            Tensor::zeros((rows, length, heads, width), one.dtype(), one.device())
        };
        let like = conditions.first().map_or(&[][..], |first| first.blocks());
        let Some((one, _)) = like.first() else {
            return Ok(None);
        };
        let rows = conditions.len();
        let blocks = like
            .iter()
            .map(|(keys, values)| Ok((of_rows(keys, rows)?, of_rows(values, rows)?)));
        Ok(Some(PaddedConditions {
            length,
            blocks: blocks.collect::<Result<_>>()?,
            zeros: of_rows(one, 1)?,
            rows: vec![None; rows],
        }))
    }

    /// Whether its rows are as many and as long as [`PaddedConditions::for_all`] makes for these conditions.
    pub(super) fn is_for(&self, conditions: &[Rc<Conditioning>]) -> bool {
        self.rows.len() == conditions.len() && Some(self.length) == length_of_all(conditions)
    }

    /// Whether items attend to rows in a pass over these conditions, some of those of the round.
    pub(super) fn serves(&self, conditions: &[Rc<Conditioning>]) -> bool {
        conditions.len() <= self.rows.len() && !is_one(conditions)
    }

    /// Takes the conditions of the items of a pass, in their order. Those that are there already are not copied.
    ///
    /// # Errors
    /// Errors of the device, such as for a condition that is longer than a row.
    pub(super) fn take(&mut self, conditions: &[Rc<Conditioning>]) -> Result<()> {
        for (number, (row, condition)) in self.rows.iter_mut().zip(conditions).enumerate() {
            if row.as_ref().is_some_and(|other| Rc::ptr_eq(other, condition)) {
                continue;
            }
            // A copy that fails leaves a row of no condition.
            let before = row.take().map_or(0, |before| before.tokens());
            let tokens = condition.tokens();
            for (from, to) in condition.blocks().iter().zip(&self.blocks) {
                for (from, to) in [(&from.0, &to.0), (&from.1, &to.1)] {
                    let to = to.narrow(0, number, 1)?;
                    ops::copy_rows(from, &to.narrow(1, 0, tokens)?)?;
                    if before > tokens {
                        let after = to.narrow(1, tokens, before - tokens)?;
                        ops::copy_rows(&self.zeros.narrow(1, 0, before - tokens)?, &after)?;
                    }
                }
            }
            *row = Some(Rc::clone(condition));
        }
        Ok(())
    }

    /// The conditions in the rows.
    pub(super) fn conditions(&self) -> impl Iterator<Item = &Rc<Conditioning>> {
        self.rows.iter().flatten()
    }
}

/// The length of the rows for these conditions; `None` where they need none, or have none in common.
fn length_of_all(conditions: &[Rc<Conditioning>]) -> Option<usize> {
    let mut lengths = conditions.iter().map(|of| padded_length(of.tokens()));
    let length = lengths.next()?;
    (!is_one(conditions) && lengths.all(|other| other == length)).then_some(length)
}

/// The lengths of the items of a pass, for its masks: of queries, and of the conditions that they attend to.
pub(super) struct Lengths([Tensor; 2]);

impl Lengths {
    /// Of items of `tokens` tokens each, which attend to these conditions.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn of(conditions: &[Rc<Conditioning>], tokens: usize) -> Result<Option<Lengths>> {
        let first = conditions.first().and_then(|first| first.blocks().first());
        let Some((keys, _)) = first else {
            return Ok(None);
        };
        let of = |count: &dyn Fn(&Conditioning) -> usize| {
            let counts: Vec<u32> = conditions.iter().map(|one| count(one) as u32).collect();
            Tensor::new(counts, keys.device())
        };
        Ok(Some(Lengths([of(&|_| tokens)?, of(&Conditioning::tokens)?])))
    }
}

/// What the items of a pass attend to, each in a row of its own.
#[derive(Clone, Copy)]
pub(super) struct Padded<'a> {
    pub(super) rows: &'a PaddedConditions,
    pub(super) lengths: &'a Lengths,
}

impl<'a> Padded<'a> {
    /// What they attend to in a block.
    ///
    /// # Errors
    /// When there is no such block.
    pub(super) fn of_block(self, block: usize) -> Result<Others<'a>> {
        let Some((keys, values)) = self.rows.blocks.get(block) else {
            candle_core::bail!("no conditions for block {block}");
        };
        let Lengths(lengths) = self.lengths;
        let items = lengths[0].dim(0)?;
        Ok(Others::OfEach {
            keys: keys.narrow(0, 0, items)?,
            values: values.narrow(0, 0, items)?,
            lengths: lengths.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    const BLOCKS: usize = 2;

    fn condition(tokens: usize, number: f32) -> Rc<Conditioning> {
        let filled = |number: f32| Tensor::full(number, (1, tokens, 2, 4), &Device::Cpu).unwrap();
        let block = |block: usize| (filled(number + block as f32), filled(-number - block as f32));
        Rc::new(Conditioning::of_blocks((0..BLOCKS).map(block).collect(), 0))
    }

    #[test]
    fn rows_have_conditions_and_zeros_after_them() {
        let [short, long, other] = [condition(3, 1.0), condition(200, 10.0), condition(40, f32::NAN)];
        let round = [&short, &long, &other].map(Rc::clone);
        let mut rows = PaddedConditions::for_all(&round).unwrap().unwrap();
        let passes = [
            vec![&short, &long, &other],
            vec![&other, &short, &long],
            vec![&long, &other],
            vec![&short, &long],
        ];
        for pass in passes {
            let pass: Vec<_> = pass.into_iter().map(Rc::clone).collect();
            assert!(rows.serves(&pass));
            rows.take(&pass).unwrap();
            let lengths = Lengths::of(&pass, 7).unwrap().unwrap();
            let padded = Padded {
                rows: &rows,
                lengths: &lengths,
            };
            for block in 0..BLOCKS {
                let Others::OfEach {
                    keys,
                    values,
                    lengths: [queries, of_keys],
                } = padded.of_block(block).unwrap()
                else {
                    panic!("a row for each")
                };
                assert_eq!(queries.to_vec1::<u32>().unwrap(), vec![7; pass.len()]);
                for (number, condition) in pass.iter().enumerate() {
                    let tokens = condition.tokens();
                    assert_eq!(of_keys.to_vec1::<u32>().unwrap()[number], tokens as u32);
                    let of_condition = &condition.blocks()[block];
                    for (row, whole) in [(&keys, &of_condition.0), (&values, &of_condition.1)] {
                        let numbers = |of: &Tensor| of.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                        let row = numbers(&row.get(number).unwrap());
                        let (taken, after) = row.split_at(whole.elem_count());
                        let is_same = |(one, other): (&f32, f32)| one.to_bits() == other.to_bits();
                        assert!(taken.iter().zip(numbers(whole)).all(is_same));
                        assert!(after.iter().all(|number| *number == 0.0));
                        assert_eq!(row.len(), 256 * 2 * 4);
                    }
                }
            }
        }
        assert!(padded_length(256) == 256 && padded_length(257) == 512);
        assert!(padded_length(1) == 256 && padded_length(700) == 1024);
    }

    #[test]
    fn conditions_have_rows_where_they_differ_and_have_one_length() {
        let [short, other, long] = [condition(3, 1.0), condition(200, 10.0), condition(257, 2.0)];
        let of = |conditions: &[&Rc<Conditioning>]| {
            let conditions: Vec<_> = conditions.iter().map(|one| Rc::clone(one)).collect();
            let rows = PaddedConditions::for_all(&conditions).unwrap();
            assert!(rows.iter().all(|rows| rows.is_for(&conditions)));
            rows
        };
        for without in [&[][..], &[&short], &[&short, &short], &[&short, &other, &long]] {
            assert!(of(without).is_none());
        }
        let rows = of(&[&short, &other, &short]).unwrap();
        for (is_for, pass) in [
            (true, vec![&short, &short, &other]),
            (false, vec![&short, &other]),
            (false, vec![&short, &other, &long]),
        ] {
            let pass: Vec<_> = pass.into_iter().map(Rc::clone).collect();
            assert_eq!(rows.is_for(&pass), is_for);
        }
        let pass = |conditions: &[&Rc<Conditioning>]| -> Vec<_> {
            conditions.iter().map(|one| Rc::clone(one)).collect()
        };
        assert!(rows.serves(&pass(&[&short, &other])) && !rows.serves(&pass(&[&short, &short])));
    }
}
