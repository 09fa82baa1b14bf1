#pragma once

#include <vector>

#include "gpipe/ranks/connections.h"
#include "gpipe/ranks/socket.h"

namespace gpipe {

/// Called once for a rank whose connection was lost while the connections were open; `cause` is empty, or says what was
/// wrong with the bytes that came. Any thread. It must not throw.
using OnLoss = std::function<void(int rank, const std::string& cause)>;

/// Returns connections over these sockets, one per rank, with none for the own one. They carry nothing else. A thread
/// reads what comes, and writes what the network has not taken at once.
std::unique_ptr<Connections> connections_over(std::vector<Socket> sockets, OnLoss on_loss);

}  // namespace gpipe
