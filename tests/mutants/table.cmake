# mutant(name source text instead filter), see CMakeLists.txt. The text must occur exactly once in the source.

# The torch-free core.
mutant(channel_does_not_wait gpipe/runtime/executor.cpp "!put_[micro_batch] && !cancelled_" "false"
       GeneratedJobs.*)
mutant(channel_waits_after_a_cancel gpipe/runtime/executor.cpp "cancelled_ = true;" "" Channel.*)
mutant(executor_works_on_after_a_failure gpipe/runtime/executor.cpp "if (failed_) return false;" "" ExecutorFailure.*)
mutant(executor_keeps_the_last_error gpipe/runtime/executor.cpp "if (failure_) return;" "" ExecutorFailure.*)
mutant(executor_leaves_ranks_waiting gpipe/runtime/executor.cpp "runner_.cancel(failure);" "" ExecutorFailure.*)
mutant(connections_write_parts_twice gpipe/ranks/connections.cpp "next.offset -= next.parts[next.part++].size();"
       "next.offset = 0, ++next.part;" GeneratedJobs.*)
mutant(connections_keep_what_an_ended_pipeline_gets gpipe/ranks/connections.cpp "|| ended_.contains(frame.pipeline)" ""
       Connections.*)
mutant(connections_cut_messages_off gpipe/ranks/connections.cpp "outbox.push_back(std::move(dropped.front()));" ""
       ConnectionsFailure.*)
mutant(handshake_lets_strangers_in gpipe/ranks/handshake.cpp "difference == 0 && " "" Handshake.*)
mutant(calls_forget_failed_backwards gpipe/ranks/agreement.cpp "calls[r].failed_before == calls[0].failed_before" "true"
       Agreement.*)
mutant(verifier_allows_duplicates gpipe/schedule/verifier.cpp "index != kMissing" "false" Verifier.*)
mutant(verifier_counts_graphs_from_the_forward gpipe/schedule/verifier.cpp "cell.has(Kind::R) ? Kind::R : Kind::F"
       "Kind::F" Verifier.*)
mutant(verifier_allows_loops gpipe/schedule/verifier.cpp "edge.from >= edge.to" "edge.from > edge.to" Verifier.*)
mutant(drains_in_ascending_order gpipe/schedule/schedules.cpp
       "auto forward = forwards.rbegin(); forward != forwards.rend()"
       "auto forward = forwards.begin(); forward != forwards.end()" FillDrain.*)
mutant(recomputes_a_fixed_number gpipe/schedule/schedules.cpp "std::max(1, in_flight[stage])" "layout.micro_batches"
       Checkpoints.*)
mutant(runs_segments_one_after_the_other gpipe/schedule/merged.cpp "kind == Kind::F ? first + i : end - 1 - i" "first + i"
       Segments.*)
mutant(lists_hold_one_more gpipe/schedule/list_schedule.cpp "<= worker.most_cells" "<= worker.most_cells + 1" ListSchedule.*)
mutant(recomputes_the_last_micro_batch gpipe/schedule/program.cpp "micro_batch + 1 < micro_batches"
       "micro_batch < micro_batches" FillDrain.*)
mutant(replay_takes_what_is_absent gpipe/schedule/verifier.cpp "if (arrival == kAbsent) return false;" "" Verifier.*)
mutant(replay_ignores_latency gpipe/schedule/verifier.cpp "start + direction.latency" "start" Simulator.*)
mutant(replay_sends_all_at_once gpipe/schedule/verifier.cpp "start + direction.sending" "start" Simulator.*)
mutant(footprint_ignores_what_a_forward_leaves gpipe/schedule/simulator.cpp "std::max(before + extra_of(*span), after)"
       "before + extra_of(*span)" Footprint.*)
mutant(blame_forgets_what_came_last gpipe/schedule/blame.cpp "node.came > nodes_[node.before].span.end" "false"
       Blame.*)
mutant(blame_counts_the_pause_as_a_wire gpipe/schedule/blame.cpp "const double pause = paused(sent, time);"
       "const double pause = 0;" Blame.*)
mutant(blame_of_one_order gpipe/schedule/blame.cpp "orders[std::popcount(without)] *" "" Blame.*)
mutant(blame_ignores_how_transfers_vary gpipe/schedule/blame.cpp "(has(without, kJitter) ? 0 : nodes_[i].late)" "0"
       Blame.*)
mutant(advice_forgets_the_loss gpipe/schedule/advice.cpp "times.rbegin()[1] += times.back();" "" Gains.*)
mutant(advice_of_chunks_as_long gpipe/schedule/advice.cpp "factor *= static_cast<double>(layout_.micro_batches) / chunks;"
       "" Gains.*)
mutant(trace_counts_the_wait_as_sleep gpipe/runtime/executor.cpp "watch->ready = std::max(watch->free.time, last);"
       "watch->ready = watch->free.time;" Executor*)
mutant(layer_times_share_weights_apart balance/layer_times.cpp
       "{Kind::I, &LayerProfile::input_gradient}, {" "{Kind::I, &LayerProfile::input_gradient}}, {{" LayerTimes.*)
mutant(layer_times_count_waits_for_a_core balance/layer_times.cpp "span.start - span.queued" "span.start" LayerTimes.*)
mutant(simulator_stores_every_forward gpipe/schedule/simulator.cpp
       "!costs.stored.empty() && program.recomputes(action.stage, action.micro_batch)" "!costs.stored.empty()"
       Simulator.*)

# Forward and backward of a mini-batch.
mutant(graph_keeps_values gpipe/graph/graph.cpp "for (const auto value : each.last_uses) frame.values[value] = {};" ""
       Graph.*)
mutant(graph_ignores_modes gpipe/graph/graph.cpp "state.training == *each.mode" "true"
       Graph.*)
mutant(drops_skip_gradient gpipe/run/mini_batch.cpp "{.tensors = std::move(of_parcel)}"
       "{.tensors = out.empty() ? std::move(of_parcel) : Gradients(of_parcel.size())}" Generated*)
mutant(frees_cells_late gpipe/run/mini_batch.cpp "    cell.reset();" "" Generated*)
mutant(shares_random_numbers gpipe/autograd/cell.cpp "stage_.first_layer + layer, micro_batch_)"
       "stage_.first_layer + layer, micro_batch_ / 2)" Generated*)
mutant(recomputes_at_random gpipe/autograd/cell.cpp "emplace(seed_, stage_.first_layer"
       "emplace(!is_checkpointed_ || is_checkpointing() ? seed_ : ~seed_, stage_.first_layer" Generated*)
mutant(adds_into_shared_gradients gpipe/autograd/boundary.cpp "= owns_memory(sum);" "= true;" Generated*)
mutant(sends_skips_without_a_root gpipe/autograd/cell.cpp "root(skip.tensor)" "root(out.back().tensors.front())"
       SkipEdges*)
mutant(sends_skips_that_were_changed gpipe/autograd/skip_routes.cpp "if (leaving_[k].parcel.changed())" "if (false)"
       SkipEdges*)
mutant(recomputes_without_copies gpipe/autograd/cell.cpp "if (retain_graph && stores_copies_)" "if (false)"
       InPlace.*:Generated*)
mutant(keeps_buffers_of_a_recompute gpipe/autograd/cell.cpp
       "  if (state_now_) StageState::end_backward(stage_, *state_now_);" "" Recompute.*:Generated*)
mutant(recomputes_from_a_changed_input gpipe/autograd/cell.cpp "if (stores_copies_) return;" "if (stage_.index >= 0) return;"
       InPlace.*)
mutant(recomputes_with_changed_parameters gpipe/autograd/parameter_sinks.cpp "sample_of(own_[i]) != samples_[i];"
       "false;" Recompute.*)
mutant(recomputes_after_other_changes gpipe/autograd/stage_state.cpp "if (forward.changes != changes_) {" "if (false) {"
       Recompute.*)
mutant(recomputes_writes_to_parameters gpipe/autograd/stage_state.cpp "if (!item.is_buffer && is_recomputed()) {"
       "if (false) {" Recompute.*)
mutant(recomputes_draws_of_generators gpipe/autograd/random_scope.cpp "} else if (is_recomputed() && " "} else if (false && "
       Recompute.*)
mutant(forgets_retained_graphs gpipe/autograd/boundary.cpp "if (retain_graph) function_ = std::move(function);" ""
       GPipe.RunsASecondBackward*)
mutant(sizes_missing_gradients_like_the_first gpipe/run/step_input.cpp "shape[0] = sizes[i];" "shape[0] = sizes[0];"
       MicroBatch*)
mutant(shares_versions_of_micro_batches gpipe/run/step_input.cpp ".variable_data()" "" MicroBatch*)
mutant(counts_deferred_batches_by_micro_batch gpipe/autograd/batch_statistics.cpp "sub_(entry.calls - 1)" "sub_(0)"
       DeferredBatchNorm*)
mutant(keeps_buffers_of_a_failed_forward gpipe/run/call.cpp "StageState::restore_after_error(pipeline_.stages()[s], before_[s]);"
       "(void)s;" DeferredBatchNorm*:Errors.*)
mutant(keeps_the_draw_of_a_failed_forward gpipe/run/call.cpp "if (draw_) draw_->undo();" "" MicroBatch.*)

# State.
mutant(hides_writes_to_inputs gpipe/run/training.cpp "torch::autograd::impl::bump_version(tensor);" "(void)0;"
       InPlace.*)
mutant(loses_writes_of_backwards gpipe/autograd/stage_state.cpp "overwrite(present, value);" "(void)value;"
       Recompute.*)
mutant(sends_views_of_state gpipe/autograd/cell.cpp "!stage_.state.has_memory_of(tensor)" "true" Recompute.*)

mutant(keeps_all_memory gpipe/tensors/kept_memory.cpp "live_bytes_ + cached_bytes_ > most" "false" KeptMemory.*)

# Steps.
mutant(keeps_gradients_of_borrowed_parameters gpipe/autograd/parameter_sinks.cpp
       "return torch::autograd::impl::gradient_edge(stand_in);" "break;" TiedParameters.*:Generated*)
mutant(drops_gradients_of_lent_parameters gpipe/autograd/cell.cpp "{root(parameter)}" "{{}}"
       TiedParameters.*:Generated*)
mutant(writes_to_lent_parameters gpipe/autograd/cell.cpp "check_tied(tied);" "" TiedParameters.*)
mutant(copies_borrowed_parameters gpipe/autograd/cell.cpp "with_copies(in, 1 + stage_.skips_in.size())" "with_copies(in, in.size())"
       TiedParameters.*:Generated*)
mutant(borrows_once_per_layer balance/stage_cost.cpp "std::exchange(last, stage)" "last" StageCost.*)
mutant(shares_the_scope_of_the_loss gpipe/autograd/cell.cpp "start(static_cast<int>(stage_.layers.size()));"
       "start(static_cast<int>(stage_.layers.size()) - 1);" Generated*)
mutant(runs_the_loss_in_both_passes gpipe/autograd/cell.cpp
       "if (loss_.layer && !is_checkpointing()) {" "if (loss_.layer) {" Step.*)
mutant(forgets_that_the_loss_wrote_into_the_input gpipe/autograd/cell.cpp
       "check_inputs(have_changed(in), \"during its recompute\")" "" Step.*)
mutant(weights_micro_batches_equally gpipe/run/step_input.cpp "std::vector<double> weights(sizes.begin(), sizes.end());"
       "std::vector<double> weights(sizes.size(), 1);" Step.*)
mutant(forgets_the_range_of_targets gpipe/run/loss_check.cpp "later.high > high + slack" "false" Step.*)
mutant(accepts_a_part_that_is_nan gpipe/run/loss_check.cpp "!std::isfinite(square_of_all)" "!std::isfinite(off)" Step.*)
mutant(ignores_the_scale gpipe/run/step_loss.cpp "weight * options_.scale()" "weight" Generated*)
mutant(takes_skip_gradients_of_another_micro_batch gpipe/run/edges.cpp "local_.take(edge, action)"
       "local_.take(edge, edge + 1 < pipeline_.count() || forward ? action : Action{action.kind, action.stage, 0})"
       Generated*)
mutant(commits_sums_after_an_error gpipe/run/mini_batch.cpp "pipeline_->team().rethrow(error);"
       "if (part != Part::kAll) pipeline_->team().rethrow(error);" Fault.*)

mutant(lets_pytorch_copy_gradients gpipe/run/training.cpp "return clone_obey_contract(gradient, parameter);" "return gradient;"
       Fault.*)

# Skips, snapshots, balances.
mutant(isolates_every_name skip/skippable.cpp "only.empty() || std::ranges::find(only, key.name) != only.end()" "true"
       Isolate*)
mutant(reads_damaged_files gpipe/snapshot/safetensors.cpp ".text() != entry.checksum" ".text().empty()" *Damage*)
mutant(loads_before_it_checks gpipe/snapshot/snapshot.cpp "check_model(reader, own);" "" SnapshotRefusals.*)
mutant(predicts_without_parameters balance/predict.cpp "stage.static_bytes(first, end) +" "" Plan.*)
mutant(plans_beyond_the_memory balance/contender.cpp "plan.missing = std::max<std::int64_t>(0,"
       "(void)std::max<std::int64_t>(0,"
       Plan.*)
mutant(recomputes_without_a_price balance/segments.cpp "seconds - prices_[price] * static_cast<double>(bytes)" "seconds"
       Plan.*)
mutant(cuts_between_tied_layers balance/cut.cpp "stage.can_cut_before(first) && stage.can_cut_before(end)" "true" Cut.*)
