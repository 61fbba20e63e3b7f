//! The part of one card, where two cards compute a stage together. A family whose steps have two passes may give each card one of
//! them, and exchange the predictions. In another each card has all weights and half of the tokens, and attends with its own
//! queries to the keys and values of both, which they exchange in every block. So both compute what one would, but for the order in
//! which sums are taken. It is sequence parallelism with gathered keys and values (Li et al. 2021, "Sequence Parallelism: Long Sequence
//! Training from System Perspective").

use std::ops::Range;
use std::rc::Rc;

use candle_core::{Device, Tensor};
use ops::Exchange;

use crate::{Observer, StageError, StageRun};

/// How many cards share the tokens of a stage.
pub(crate) const CARDS: usize = model::MAX_CARDS as usize;

/// How tokens are divided between this card and the other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Half {
    /// This card's part, 0 or 1.
    part: u32,
}

impl Half {
    /// Both parts. Of an odd number of tokens the first has one more.
    pub(crate) const BOTH: [Half; CARDS] = [Half { part: 0 }, Half { part: 1 }];

    /// The part of a run; `None` if one card has all tokens.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for a part that is none of two.
    pub(crate) fn of(run: &StageRun<'_>) -> Result<Option<Half>, StageError> {
        match run.part {
            None => Ok(None),
            Some(part) if (part as usize) < CARDS => Ok(Some(Half { part })),
            Some(part) => Err(StageError::BadInput(format!("part {part} of {CARDS}"))),
        }
    }

    /// The number of the part, from 0.
    pub(crate) fn number(self) -> usize {
        self.part as usize
    }

    /// This card's of so many tokens.
    pub(crate) fn own(self, tokens: usize) -> Range<usize> {
        let first = tokens.div_ceil(CARDS);
        match self.part {
            0 => 0..first,
            _ => first..tokens,
        }
    }

    /// The other card's.
    pub(crate) fn others(self, tokens: usize) -> Range<usize> {
        Half { part: 1 - self.part }.own(tokens)
    }
}

/// The exchange with the other card in a run of a stage.
#[derive(Clone, Debug)]
pub(crate) struct OtherCard {
    exchange: Rc<Exchange>,
    half: Half,
}

impl OtherCard {
    /// Finds the other card of a stage; `None` if one card runs it. At most so many bytes are exchanged at a time.
    ///
    /// # Errors
    /// Errors of [`Observer::meet`]; when cards do not reach each other's memory.
    pub(crate) fn meet(
        half: Option<Half>,
        bytes: u64,
        device: &Device,
        observer: &mut dyn Observer,
    ) -> Result<Option<OtherCard>, StageError> {
        let Some(half) = half else {
            return Ok(None);
        };
        let exchange = Exchange::open(device, bytes, &mut |offer| observer.meet(offer))?;
        Ok(Some(OtherCard {
            exchange: Rc::new(exchange),
            half,
        }))
    }

    /// Sends rows, and receives those of the other card: see [`Exchange::swap`].
    ///
    /// # Errors
    /// Errors of the exchange.
    pub(crate) fn swap(&self, own: &Tensor, theirs: &Tensor) -> candle_core::Result<()> {
        self.exchange.swap(own, theirs)
    }

    /// All tokens, of which this card has `own`, `[1, own, width]`.
    ///
    /// # Errors
    /// Errors of the exchange.
    pub(crate) fn gathered(&self, own: &Tensor, tokens: usize) -> candle_core::Result<Tensor> {
        let (_, _, width) = own.dims3()?;
        let all = Tensor::zeros((1, tokens, width), own.dtype(), own.device())?;
        let part = |range: Range<usize>| all.narrow(1, range.start, range.len());
        ops::copy_rows(own, &part(self.half.own(tokens))?)?;
        self.swap(own, &part(self.half.others(tokens))?)?;
        Ok(all)
    }

    /// What the first card has, then what the second has.
    pub(crate) fn in_order<T>(&self, own: T, theirs: T) -> [T; 2] {
        match self.half.part {
            0 => [own, theirs],
            _ => [theirs, own],
        }
    }

    /// Waits until this card has done its work, which may wait for the other card, or the stage is cancelled.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; errors of the exchange.
    pub(crate) fn wait_for_work(&self, observer: &dyn Observer) -> Result<(), StageError> {
        let waited = self.exchange.wait_for_work(&|| observer.cancelled());
        observer.check_cancelled()?;
        Ok(waited?)
    }

    /// Waits until both cards have done their work, and neither needs the other's memory any more, at the end of a stage.
    ///
    /// # Errors
    /// As [`OtherCard::wait_for_work`]; errors of [`Observer::meet`].
    pub(crate) fn close(&self, observer: &mut dyn Observer) -> Result<(), StageError> {
        self.wait_for_work(observer)?;
        self.exchange.close(&mut |offer| observer.meet(offer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_parts_are_all_tokens() {
        for tokens in 0..9 {
            let [first, second] = Half::BOTH;
            assert_eq!(first.own(tokens).end, second.own(tokens).start);
            assert_eq!((first.own(tokens).start, second.own(tokens).end), (0, tokens));
            assert_eq!(first.others(tokens), second.own(tokens));
            assert!(first.own(tokens).len() >= second.own(tokens).len());
        }
    }
}
