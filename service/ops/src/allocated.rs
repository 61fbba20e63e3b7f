//! Bytes that an allocation takes on a device.

/// Granularity of allocations on a CUDA device, in bytes.
const GRANULARITY: u64 = 512;

/// Bytes that an allocation of `bytes` takes on a device, rounded up: predictions of scratch are sums of these.
#[must_use]
pub fn allocated(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(GRANULARITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_is_rounded_up_to_the_granularity() {
        assert_eq!([0, 1, 512, 513].map(allocated), [0, 512, 512, 1024]);
    }
}
