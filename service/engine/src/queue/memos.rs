//! Cache of stages' values for other jobs, so that the same prompt is not encoded twice. Its bytes are bounded; the least
//! recently used values are dropped first.

use std::collections::BTreeMap;

use model::Values;
use residency::Bytes;

/// The cache.
pub(super) struct Memos {
    bound: Bytes,
    kept: BTreeMap<String, (u64, Values)>,
    bytes: Bytes,
    uses: u64,
}

impl Memos {
    pub(super) fn new(bound: Bytes) -> Memos {
        Memos {
            bound,
            kept: BTreeMap::new(),
            bytes: Bytes::ZERO,
            uses: 0,
        }
    }

    pub(super) fn contains(&self, key: &str) -> bool {
        self.kept.contains_key(key)
    }

    pub(super) fn get(&mut self, key: &str) -> Option<Values> {
        self.uses += 1;
        let (used, values) = self.kept.get_mut(key)?;
        *used = self.uses;
        Some(values.clone())
    }

    pub(super) fn put(&mut self, key: String, values: Values) {
        let wanted = bytes_of(&values);
        if wanted > self.bound {
            return;
        }
        self.uses += 1;
        if let Some((_, old)) = self.kept.insert(key, (self.uses, values)) {
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

fn bytes_of(values: &Values) -> Bytes {
    let bytes = values.iter().map(|(name, tensor)| name.len() + tensor.data.len());
    Bytes(bytes.sum::<usize>() as u64)
}

#[cfg(test)]
mod tests {
    use model::{HostTensor, HostType};

    use super::*;

    fn values(bytes: usize) -> Values {
        let data = vec![0; bytes].into();
        let tensor = HostTensor {
            dtype: HostType::F16,
            shape: vec![bytes / 2],
            data,
        };
        Values::from([(String::new(), tensor)])
    }

    #[test]
    fn the_cache_drops_the_least_recently_used_and_takes_none_above_its_bound() {
        let mut memos = Memos::new(Bytes(100));
        memos.put("one".into(), values(40));
        memos.put("two".into(), values(40));
        assert!(memos.get("one").is_some());
        memos.put("three".into(), values(40));
        assert!(memos.contains("one") && !memos.contains("two") && memos.contains("three"));
        assert_eq!((memos.len(), memos.bytes()), (2, Bytes(80)));
        memos.put("huge".into(), values(102));
        assert!(!memos.contains("huge") && memos.len() == 2);
        memos.put("one".into(), values(20));
        assert_eq!(memos.bytes(), Bytes(60), "one that is replaced is counted once");
    }
}
