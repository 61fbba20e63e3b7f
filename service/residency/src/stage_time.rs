//! How long a stage takes over components of which a part is on the card: the blocks that are streamed arrive while others are
//! computed, so a pass takes as long as the slower of the two.

use serde::{Deserialize, Serialize};

use crate::nouns::{Bytes, Component};
use crate::parts::Part;

/// What the time of a stage depends on, besides the parts of its components.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageTime {
    /// Passes over the blocks.
    pub passes: u32,
    /// Seconds of a pass with all components whole on the card.
    pub pass_seconds: f64,
    /// Bytes a second at which streamed blocks reach the card.
    pub link: Bytes,
}

/// The predicted time of a stage, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageSeconds {
    /// With all components whole on the card.
    pub resident: f64,
    /// With the blocks streamed that are not in these parts.
    pub streamed: f64,
    /// Of which each pass takes this much longer than a resident one.
    pub more_each_pass: f64,
}

impl StageSeconds {
    /// What streaming adds to the stage.
    pub fn more(&self) -> f64 {
        (self.streamed - self.resident).max(0.0)
    }
}

impl StageTime {
    /// The time of a stage with these parts of its components. Streamed blocks are spread over the pass and copied ahead, so all
    /// copies hide behind the computation as far as it lasts; only the first block is waited for, and the blocks that are used
    /// once. In a single pass streaming adds nothing: its blocks cross the link once either way, now or in a load.
    pub fn predict<'a>(&self, parts: impl IntoIterator<Item = (&'a Component, Part)>) -> StageSeconds {
        let (mut each_pass, mut at_first) = (Bytes::ZERO, Bytes::ZERO);
        for (component, part) in parts {
            let size = component.size_of(part);
            each_pass += size.streamed;
            at_first += size.streamed_once;
            if size.streamed > Bytes::ZERO {
                at_first += component.largest_block(part);
            }
        }
        let seconds = |bytes: Bytes| bytes.0 as f64 / self.link.0.max(1) as f64;
        let resident = self.pass_seconds * f64::from(self.passes);
        if self.passes <= 1 {
            return StageSeconds {
                resident,
                streamed: resident,
                more_each_pass: 0.0,
            };
        }
        let pass = self.pass_seconds.max(seconds(each_pass));
        StageSeconds {
            resident,
            streamed: seconds(at_first) + pass * f64::from(self.passes),
            more_each_pass: pass - self.pass_seconds,
        }
    }
}

impl Component {
    /// Bytes of the largest streamed block of a part: half of the memory through which blocks pass.
    fn largest_block(&self, part: Part) -> Bytes {
        let size = self.size_of(part);
        let stays = self.bytes - size.streamed - size.streamed_once;
        Bytes((size.bytes - stays).0 / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ComponentId, PartSize, Parts};

    /// A component of ten blocks of 100 bytes, and 200 that are used once, of which the last part streams all.
    fn component() -> Component {
        let size = |streamed: u64, once: u64| PartSize {
            bytes: Bytes(1200 - streamed - once + 200),
            streamed: Bytes(streamed),
            streamed_once: Bytes(once),
        };
        Component {
            id: ComponentId::new("c"),
            name: "c".to_owned(),
            bytes: Bytes(1200),
            reload_seconds: 0.0,
            parts: Parts::new(Bytes(1200), [size(500, 0), size(1000, 200)], |_| {}),
        }
    }

    fn predicted(passes: u32, pass_seconds: f64, part: u32) -> StageSeconds {
        let time = StageTime {
            passes,
            pass_seconds,
            link: Bytes(100),
        };
        time.predict([(&component(), Part(part))])
    }

    #[test]
    fn a_pass_takes_as_long_as_the_slower_of_computation_and_copies() {
        let whole = predicted(4, 7.0, 0);
        assert_eq!((whole.resident, whole.streamed, whole.more()), (28.0, 28.0, 0.0));
        // 5 s of copies hide behind 7 of computation; the first block takes 1.
        let hidden = predicted(4, 7.0, 1);
        assert_eq!((hidden.streamed, hidden.more_each_pass), (29.0, 0.0));
        // 10 s of copies do not; what is used once takes 2.
        let seen = predicted(4, 7.0, 2);
        assert_eq!((seen.streamed, seen.more_each_pass), (43.0, 3.0));
        assert_eq!(seen.more(), 15.0);
        // In one pass the blocks would cross the link all the same.
        assert_eq!(predicted(1, 7.0, 2).more(), 0.0);
    }
}
