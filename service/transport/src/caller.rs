//! The caller of a request that was let in.

use std::time::Duration;

use calls::Caller;
use tonic::codegen::http::Extensions;
use tonic::transport::server::TcpConnectInfo;

use crate::methods::Admitted;

/// The caller, who waits for so long (`None`: as long as it takes).
pub fn caller_within(extensions: &Extensions, timeout: Option<Duration>) -> Caller {
    let address = extensions
        .get::<TcpConnectInfo>()
        .and_then(TcpConnectInfo::remote_addr);
    let admitted = extensions.get::<Admitted>();
    let caller = Caller::new(
        address,
        timeout,
        admitted.and_then(|admitted| admitted.holder.clone()),
    );
    match admitted.and_then(|admitted| admitted.trace.clone()) {
        Some(trace) => caller.in_trace(trace),
        None => caller,
    }
}

/// The caller of a request without a time limit of its own.
pub fn caller(extensions: &Extensions) -> Caller {
    caller_within(extensions, None)
}
