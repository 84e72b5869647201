//! Calls that block on the host.

use std::time::{Duration, Instant};

use kfd_abi::event::KFD_IOC_WAIT_RESULT_TIMEOUT;
use virtio_kfd_protocol::calls::{ReadSmi, WaitDoorbells, WaitEvents};
use virtio_kfd_protocol::{
    CallType, ReadSmiAnswer, ReadSmiRequest, SMI_NOTHING, Status, WaitDoorbellsAnswer, WaitDoorbellsRequest,
    WaitEventsAnswer, WaitEventsRequest,
};

use super::rings::Claim;
use super::{Answer, Client, ClientError, HOST_SILENCE};

/// The longest wait that is sent in one piece: a host that has died is noticed after this and [`HOST_SILENCE`].
const PIECE: Duration = Duration::from_secs(60);

/// The longest wait that is sent in one piece on a ring that threads take turns on.
const TURN: Duration = Duration::from_millis(250);

/// The shortest and the longest pause before a wait that the host had no room for is sent again.
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(32));

/// A call that blocks for up to a time-out in its request.
pub trait WaitCall: CallType {
    /// The time-out; none waits for ever.
    fn timeout(request: &Self::Request) -> Option<Duration>;
    /// The same request with another time-out, rounded up to what the call can express.
    fn with_timeout(request: &Self::Request, timeout: Duration) -> Self::Request;
    /// Whether the answer says that the time-out has passed.
    fn timed_out(answer: &Self::Answer) -> bool;
}

impl WaitCall for WaitEvents {
    fn timeout(request: &WaitEventsRequest) -> Option<Duration> {
        (request.timeout != u32::MAX).then(|| Duration::from_millis(request.timeout.into()))
    }

    fn with_timeout(request: &WaitEventsRequest, timeout: Duration) -> WaitEventsRequest {
        let millis = timeout.as_nanos().div_ceil(1_000_000);
        // u32::MAX would wait for ever.
        WaitEventsRequest { timeout: u32::try_from(millis).unwrap_or(u32::MAX).min(u32::MAX - 1), ..*request }
    }

    fn timed_out(answer: &WaitEventsAnswer) -> bool {
        answer.errno == 0 && answer.wait_result == KFD_IOC_WAIT_RESULT_TIMEOUT
    }
}

impl WaitCall for WaitDoorbells {
    fn timeout(request: &WaitDoorbellsRequest) -> Option<Duration> {
        Some(Duration::from_millis(request.timeout_ms.into()))
    }

    fn with_timeout(request: &WaitDoorbellsRequest, timeout: Duration) -> WaitDoorbellsRequest {
        let millis = timeout.as_nanos().div_ceil(1_000_000);
        WaitDoorbellsRequest { timeout_ms: u32::try_from(millis).unwrap_or(u32::MAX), ..*request }
    }

    fn timed_out(answer: &WaitDoorbellsAnswer) -> bool {
        answer.still == 0
    }
}

impl WaitCall for ReadSmi {
    fn timeout(request: &ReadSmiRequest) -> Option<Duration> {
        (request.timeout != u32::MAX).then(|| Duration::from_millis(request.timeout.into()))
    }

    fn with_timeout(request: &ReadSmiRequest, timeout: Duration) -> ReadSmiRequest {
        let millis = timeout.as_nanos().div_ceil(1_000_000);
        // u32::MAX would wait for ever.
        ReadSmiRequest { timeout: u32::try_from(millis).unwrap_or(u32::MAX).min(u32::MAX - 1), ..*request }
    }

    fn timed_out(answer: &ReadSmiAnswer) -> bool {
        answer.outcome == SMI_NOTHING
    }
}

/// See [`Client::wait_call`].
pub(super) fn wait_call<C: WaitCall>(
    client: &Client,
    request: &C::Request,
    tail: &[C::RequestTail],
    answer_elements: usize,
) -> Result<Answer<C>, ClientError> {
    client.usable()?;
    let piece = |ring, timeout: Duration| {
        let limit = timeout.saturating_add(HOST_SILENCE);
        let request = C::with_timeout(request, timeout);
        client.call_on::<C>(ring, &request, tail, answer_elements, limit)
    };
    let timeout = C::timeout(request);
    // A time-out beyond what the clock can express is for ever.
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let look = || piece(client.rings.look_ring(), Duration::ZERO);
    if timeout.is_some_and(|timeout| timeout.is_zero()) {
        return look();
    }
    let mut pause = PAUSE.0;
    loop {
        let Some(claim) = client.rings.claim(deadline) else { return look() };
        let longest = match claim {
            Claim { turns: false, .. } => PIECE,
            Claim { turns: true, .. } => TURN,
        };
        // The same ring serves until it is done, or until others wait for their turn.
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let answer = match piece(claim.ring, left.map_or(longest, |left| left.min(longest))) {
                // The queue between guest and host is full of waits. Looks still pass, so that what this thread waits
                // for is noticed meanwhile; one that is refused too is not short of room.
                Err(error) if matches!(error.status(), Some((Status::LIMIT, _))) => {
                    let answer = look()?;
                    if C::timed_out(&answer.0) {
                        std::thread::sleep(left.map_or(pause, |left| left.min(pause)));
                        pause = pause.saturating_mul(2).min(PAUSE.1);
                    }
                    answer
                }
                other => {
                    pause = PAUSE.0;
                    other?
                }
            };
            // By our own clock: a host that is short of something may end a wait before its time.
            let over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if over || !C::timed_out(&answer.0) {
                return Ok(answer);
            }
            if claim.turns && client.rings.contended() {
                break;
            }
        }
    }
}
