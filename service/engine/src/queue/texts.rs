//! What text encoders said, so that the same prompt is not encoded twice: bounded bytes, least lately used first.

use std::collections::BTreeMap;

use pipelines::EncodedText;
use residency::{Bytes, Component};

/// The cache.
pub(super) struct Texts {
    bound: Bytes,
    kept: BTreeMap<String, (u64, EncodedText)>,
    bytes: Bytes,
    uses: u64,
}

impl Texts {
    pub(super) fn new(bound: Bytes) -> Texts {
        Texts {
            bound,
            kept: BTreeMap::new(),
            bytes: Bytes::ZERO,
            uses: 0,
        }
    }

    /// The key of an encoding: who encodes, and what.
    pub(super) fn key(encoders: &[Component], text_key: &str) -> String {
        let mut key = String::new();
        for encoder in encoders {
            key.push_str(&encoder.id.0);
            key.push('|');
        }
        key + text_key
    }

    pub(super) fn contains(&self, key: &str) -> bool {
        self.kept.contains_key(key)
    }

    pub(super) fn get(&mut self, key: &str) -> Option<EncodedText> {
        self.uses += 1;
        let (used, text) = self.kept.get_mut(key)?;
        *used = self.uses;
        Some(text.clone())
    }

    pub(super) fn put(&mut self, key: String, text: EncodedText) {
        let wanted = bytes_of(&text);
        if wanted > self.bound {
            return;
        }
        self.uses += 1;
        if let Some((_, old)) = self.kept.insert(key, (self.uses, text)) {
            self.bytes -= bytes_of(&old);
        }
        self.bytes += wanted;
        while self.bytes > self.bound {
            let oldest = self
                .kept
                .iter()
                .min_by_key(|(_, (used, _))| *used)
                .map(|(key, _)| key.clone());
            let Some((_, gone)) = oldest.and_then(|key| self.kept.remove(&key)) else {
                return;
            };
            self.bytes -= bytes_of(&gone);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.bytes
    }
}

fn bytes_of(text: &EncodedText) -> Bytes {
    Bytes(
        text.tensors
            .iter()
            .map(|(name, tensor)| (name.len() + tensor.data.len()) as u64)
            .sum(),
    )
}

#[cfg(test)]
mod tests {
    use pipelines::{HostTensor, HostType};

    use super::*;

    fn text(bytes: usize) -> EncodedText {
        let data = vec![0; bytes].into();
        let tensor = HostTensor {
            dtype: HostType::F16,
            shape: vec![bytes / 2],
            data,
        };
        EncodedText {
            tensors: vec![(String::new(), tensor)],
        }
    }

    #[test]
    fn what_was_used_longest_ago_goes_first_and_what_exceeds_the_bound_is_not_taken() {
        let mut texts = Texts::new(Bytes(100));
        texts.put("one".into(), text(40));
        texts.put("two".into(), text(40));
        assert!(texts.get("one").is_some());
        texts.put("three".into(), text(40));
        assert!(texts.contains("one") && !texts.contains("two") && texts.contains("three"));
        assert_eq!((texts.len(), texts.bytes()), (2, Bytes(80)));
        texts.put("huge".into(), text(102));
        assert!(!texts.contains("huge") && texts.len() == 2);
        texts.put("one".into(), text(20));
        assert_eq!(texts.bytes(), Bytes(60), "one that is replaced is counted once");
    }
}
