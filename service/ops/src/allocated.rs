//! What an allocation takes on a device.

/// What allocations on a CUDA device are rounded up to, in bytes.
const GRANULARITY: u64 = 512;

/// What an allocation of so many bytes takes on a device: predictions of scratch add these up.
#[must_use]
pub fn allocated(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(GRANULARITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_takes_whole_pieces() {
        assert_eq!([0, 1, 512, 513].map(allocated), [0, 512, 512, 1024]);
    }
}
